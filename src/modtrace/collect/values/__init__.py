"""Measures tensors as the captures ask, and makes the rows of `values`."""
