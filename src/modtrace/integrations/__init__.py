"""Callbacks with which training frameworks record: each module imports its framework, and `import modtrace` none."""
