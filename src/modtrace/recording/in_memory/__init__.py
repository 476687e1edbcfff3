"""A recording that is kept in memory: its rows and its whole tensors."""
