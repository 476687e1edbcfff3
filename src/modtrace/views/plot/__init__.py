"""Plots of values over steps, drawn with matplotlib."""
