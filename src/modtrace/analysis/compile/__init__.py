"""Finds what torch.compile did: its regions, why it compiled again, and the kernels that it made of ops."""
