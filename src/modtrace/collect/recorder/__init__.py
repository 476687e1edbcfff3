"""The recorder of `record()`, with its flush timer, its signals, and the description of the run."""
