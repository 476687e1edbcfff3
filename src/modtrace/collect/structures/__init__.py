"""Finds the tensors in arguments and outputs of modules, and rebuilds such structures."""
