"""Predicts what a layout takes in memory and time, and finds the best one for a model on some GPUs."""
