"""The graph of a step in columns: nodes for ops and calls, edges for tensors, layers for modules."""
