"""Folders as `transformers` writes and reads them."""
