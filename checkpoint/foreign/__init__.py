"""Formats of others, which nothing else in `checkpoint` imports."""
