"""What measures any tensor, as it is wanted: with all that may be in the way."""
