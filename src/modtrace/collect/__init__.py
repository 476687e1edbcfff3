"""How execution is seen: hooks into PyTorch that turn what runs into rows."""
