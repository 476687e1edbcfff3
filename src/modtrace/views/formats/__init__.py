"""Writes files for other viewers: Perfetto, GraphML and Model Explorer."""
