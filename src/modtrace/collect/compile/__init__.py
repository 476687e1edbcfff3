"""Hooks and taps that also work inside of code compiled by `torch.compile`."""
