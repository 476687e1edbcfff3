"""Steps of one run, the same seed twice, and models of several widths."""
