"""Tracks module calls by hooks around every forward, and knows which call runs now on each thread."""
