"""Has tensors measured as the captures ask, and makes the rows of `values`."""
