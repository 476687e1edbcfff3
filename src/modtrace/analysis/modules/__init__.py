"""Builds the module tree of a step, with calls, times and values, and folds equal modules."""
