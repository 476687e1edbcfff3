"""Follows the runs of the autograd engine: the backward of each call, its gradients, and recomputed calls."""
