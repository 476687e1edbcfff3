"""Compares the ranks of one run with each other."""
