"""Measurements of our own code against hand-written loops and other libraries, side by side in one run."""
