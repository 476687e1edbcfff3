"""Selects measured values, and computes their histories, histograms and stacks, and the first that is not finite."""
