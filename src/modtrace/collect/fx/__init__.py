"""The qualified module path of each node of a torch.fx graph."""
