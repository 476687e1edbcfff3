"""Assigns calls to training steps, and makes the rows of calls and steps."""
