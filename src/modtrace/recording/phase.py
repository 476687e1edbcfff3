"""The phases a call can run in."""

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"

#: In the order of their codes in the `calls` and `ops` tables; a new phase goes at the end.
PHASES = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)
