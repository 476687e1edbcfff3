"""How many floating-point operations an op takes; unknown where no formula is known."""
