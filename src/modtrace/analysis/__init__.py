"""What a recording means: pure functions from its tables to plain frozen dataclasses."""
