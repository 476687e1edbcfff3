"""Tracks module calls by hooks around every forward, and knows which call is running on each thread."""
