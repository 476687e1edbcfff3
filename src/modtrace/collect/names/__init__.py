"""Paths of modules, parameters and buffers as users know them."""
