"""All-reduce = reduce-scatter + all-gather, to read and to measure: `python -m recipes.ring`."""
