"""Draws graphs with the DOT language and the program `dot` of Graphviz."""
