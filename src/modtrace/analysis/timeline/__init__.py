"""Builds timelines: the calls and ops of a step as spans on lanes."""
