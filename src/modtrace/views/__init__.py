"""Renders the results of analyses."""
