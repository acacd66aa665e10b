"""Sharding written out by hand, to be read before `parallel/fsdp2.py`: `python -m recipes.sharding_by_hand`."""
