"""Sees the operators that run, and makes rows of them: names, arguments, tensors, costs, saved memory."""
