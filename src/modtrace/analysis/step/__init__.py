"""One step of a recording: its choice, its calls, ops and times, and their places in the module tree."""
