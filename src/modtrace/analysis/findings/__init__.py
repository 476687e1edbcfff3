"""What is wrong with a run: each finding with its place, its numbers, and what to do."""
