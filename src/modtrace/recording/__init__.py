"""Defines the contents of a recording: its tables, its vocabulary, and the two protocols between the layers."""
