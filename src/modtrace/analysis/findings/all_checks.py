"""Lists the checks of modtrace, in the order in which equally grave findings are shown."""

from .check import RunCheck
from .failed_call import FAILED
from .graph_over_steps import GRAPH_OVER_STEPS
from .memory_growth import MEMORY_GROWTH
from .no_gradient import NO_GRADIENT
from .nonfinite_values import NONFINITE
from .not_in_optimizer import NOT_IN_OPTIMIZER
from .uncleared_gradients import UNCLEARED_GRADIENTS

#: All checks that run by default.
CHECKS: tuple[RunCheck, ...] = (
    FAILED,
    NONFINITE,
    NO_GRADIENT,
    NOT_IN_OPTIMIZER,
    UNCLEARED_GRADIENTS,
    GRAPH_OVER_STEPS,
    MEMORY_GROWTH,
)
