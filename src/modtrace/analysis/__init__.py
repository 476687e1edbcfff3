"""Analyses of recordings: pure functions from tables to plain frozen dataclasses."""
