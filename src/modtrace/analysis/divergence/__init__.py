"""Finds where two aligned recordings differ by more than noise, and which op or module made the difference."""
