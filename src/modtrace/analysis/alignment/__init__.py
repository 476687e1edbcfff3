"""Finds which calls, ops and measured tensors of one recording correspond to which of another."""
