"""Holds the last steps in memory, and writes them when a trigger fires."""
