"""Identities of tensors and storages over their lives; in C where it is compiled."""
