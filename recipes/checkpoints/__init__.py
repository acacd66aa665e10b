"""The command `python -m recipes.checkpoints`: looks at checkpoints, checks, compares, divides and converts them."""
