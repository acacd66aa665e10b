"""Layers that the models of this folder are put together from."""
