"""What a recording is: its tables, its vocabulary, and the two protocols through which the layers meet."""
