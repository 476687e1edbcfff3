"""Finds the tensors in what modules take and return, and builds such structures again."""
