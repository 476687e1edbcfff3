"""Finds what made the NaN and infinite values of a step, by following what every op read and returned."""
