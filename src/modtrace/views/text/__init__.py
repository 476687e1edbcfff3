"""Tables and trees for a terminal, and the same as JSON."""
