"""The usual statistics: counts, extremes and sums, in Python, in C and on devices, and the rows that hold them."""
