"""Files that other viewers open: Perfetto, GraphML and Model Explorer."""
