"""The calls and ops of a step as spans on tracks of time."""
