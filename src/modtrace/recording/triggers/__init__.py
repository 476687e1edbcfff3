"""Triggers: the users' conditions on values, and the watch that decides which of them fire."""
