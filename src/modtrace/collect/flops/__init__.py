"""Counts the floating-point operations of an op; the count is unknown if there is no formula."""
