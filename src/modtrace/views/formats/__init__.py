"""Writes files for other viewers: Perfetto and Model Explorer."""
