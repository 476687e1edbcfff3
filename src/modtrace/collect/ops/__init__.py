"""Sees the operators that run, and makes their rows: names, arguments, tensors, costs, saved memory."""
