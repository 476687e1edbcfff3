"""Logs what ran on each thread, in order: calls, their nesting, and the contexts they were called from."""
