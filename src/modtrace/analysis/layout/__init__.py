"""Coordinates for the nodes and lines of a graph that is drawn top down."""
