"""What the autograd engine runs: which calls' backward, and what is recomputed for whom."""
