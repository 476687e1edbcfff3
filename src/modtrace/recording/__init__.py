"""The contents of a recording: its tables, its vocabulary, and the two protocols through which the layers meet."""
