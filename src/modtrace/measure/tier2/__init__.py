"""Histograms, largest elements and samples, in Python, in C and on devices."""
