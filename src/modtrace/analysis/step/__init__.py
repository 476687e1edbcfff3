"""One step of a recording: which one is shown, its calls, ops and times, and the tree they stand in."""
