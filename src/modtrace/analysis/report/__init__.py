"""Builds the tables of the report that a browser shows, from the answers of the other analyses."""
