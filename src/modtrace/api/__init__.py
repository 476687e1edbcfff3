"""Holds the public functions and classes of modtrace, which combine the lower packages."""
