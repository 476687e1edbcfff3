"""Hashes and sketches, in Python, in C and on devices."""
