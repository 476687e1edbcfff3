"""Triggers: conditions on values that users give, and the watch that decides which of them fire."""
