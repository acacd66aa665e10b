"""What a recipe holds, sends and computes on each rank: predicted beside measured, or at a size that no machine has."""
