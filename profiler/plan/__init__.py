"""Checks of one plan by arithmetic, a dry run or a run with PyTorch; not for real training."""
