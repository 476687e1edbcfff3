"""What ran, in order, for each thread: calls, their nesting and the contexts they were called from."""
