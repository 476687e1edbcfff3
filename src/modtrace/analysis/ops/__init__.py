"""Tables of the ops of a step: what they cost, where they ran, and what memory they took."""
