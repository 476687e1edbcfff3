"""How a tensor is measured: its statistics, with nothing of the user's run seeing it."""
