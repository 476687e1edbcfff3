"""Tables of the ops of a step: their costs, their modules, and their memory."""
