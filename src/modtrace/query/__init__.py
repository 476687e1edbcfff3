"""Asks datasets of many runs and ranks, in SQL, with an engine that runs it."""
