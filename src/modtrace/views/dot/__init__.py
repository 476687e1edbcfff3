"""Draws graphs with the DOT language and the program of Graphviz."""
