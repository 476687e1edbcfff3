"""Proves a recording by running the recorded ops once more."""
