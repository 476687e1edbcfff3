"""Hooks that torch.compile leaves in its graphs, so that what is compiled is still seen."""
