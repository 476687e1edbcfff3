"""Who made the NaN and infinite values: every op of a step, by what it read and what it returned."""
