"""What of a graph is shown: depth, folding and contraction give a smaller graph for pictures."""
