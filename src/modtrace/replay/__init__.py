"""Proves a recording by running what it holds once more: a recording plus torch."""
