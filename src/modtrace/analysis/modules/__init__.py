"""The module tree of a step, with calls, times and values; what is alike is folded."""
