"""Measured values of tensors: selected, as statistics over steps, as history, and the first that is not finite."""
