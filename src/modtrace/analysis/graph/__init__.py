"""Builds the graph of a step as columns: nodes for ops and calls, edges for tensors, layers for modules."""
