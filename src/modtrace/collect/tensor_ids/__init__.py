"""Identifies tensors and storages over their lives; in C if it is compiled."""
