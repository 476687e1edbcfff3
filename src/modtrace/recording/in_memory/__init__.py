"""Keeps a recording in memory: its rows and its whole tensors."""
