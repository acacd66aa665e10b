"""Plans a training: which layout of a model on some GPUs fits and is fastest."""
