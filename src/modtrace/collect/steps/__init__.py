"""Which training step a call belongs to, and the rows of calls and steps."""
