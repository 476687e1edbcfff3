"""Hooks and taps that also run inside code compiled by `torch.compile`."""
