"""Measures tensors: computes their statistics without being seen by the user's run."""
