"""Measured values: their selection, statistics over steps, histories, and the first that is not finite."""
