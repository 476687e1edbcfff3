"""Hooks into PyTorch that see what runs and turn it into rows."""
