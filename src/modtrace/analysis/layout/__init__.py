"""Computes coordinates for the nodes and lines of a graph that is drawn from top to bottom."""
