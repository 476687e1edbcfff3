"""Selects what is shown of a graph: depth, folding and contraction make smaller graphs for pictures."""
