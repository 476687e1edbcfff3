"""The tables of a recording, joined into columns that all analyses read."""
