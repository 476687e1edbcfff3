"""The tracker of module calls: hooks around every forward, and which call runs now on which thread."""
