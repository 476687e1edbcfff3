"""What `record()` keeps running: the recorder, its flush timer, signals, and what is known of the run."""
