"""Lists the checks of modtrace, in the order in which equally grave findings are shown."""

from .check import Check
from .nonfinite_values import NONFINITE

#: All checks that run by default.
CHECKS: tuple[Check, ...] = (NONFINITE,)
