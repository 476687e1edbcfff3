"""Lists the checks of modtrace, in the order in which equally grave findings are shown."""

from .attention_logits import ATTENTION_LOGITS
from .check import RunCheck
from .dead_units import DEAD_UNITS
from .double_softmax import DOUBLE_SOFTMAX
from .dropout_in_eval import DROPOUT_IN_EVAL
from .failed_call import FAILED
from .format_range import FLOAT16_RANGE
from .gradient_depth import GRADIENTS_OVER_DEPTH
from .graph_over_steps import GRAPH_OVER_STEPS
from .input_bound import INPUT_BOUND
from .loss_spike import LOSS_SPIKE
from .massive_activations import MASSIVE_ACTIVATIONS
from .memory_growth import MEMORY_GROWTH
from .modes import MODES
from .no_gradient import NO_GRADIENT
from .nonfinite_values import NONFINITE
from .not_in_optimizer import NOT_IN_OPTIMIZER
from .out_of_memory import OUT_OF_MEMORY
from .recompiled import RECOMPILED
from .rounded_updates import ROUNDED_UPDATES
from .scaler_skips import GRAD_SCALER
from .shared_modules import SHARED_MODULES
from .uncleared_gradients import UNCLEARED_GRADIENTS
from .unused_experts import UNUSED_EXPERTS
from .update_size import UPDATE_SIZE
from .zero_gradients import ZERO_GRADIENTS

#: All checks that run by default.
CHECKS: tuple[RunCheck, ...] = (
    FAILED,
    OUT_OF_MEMORY,
    NONFINITE,
    UNUSED_EXPERTS,
    NO_GRADIENT,
    NOT_IN_OPTIMIZER,
    UNCLEARED_GRADIENTS,
    GRAPH_OVER_STEPS,
    MEMORY_GROWTH,
    INPUT_BOUND,
    RECOMPILED,
    GRAD_SCALER,
    MODES,
    DROPOUT_IN_EVAL,
    DOUBLE_SOFTMAX,
    ZERO_GRADIENTS,
    DEAD_UNITS,
    ROUNDED_UPDATES,
    GRADIENTS_OVER_DEPTH,
    FLOAT16_RANGE,
    UPDATE_SIZE,
    ATTENTION_LOGITS,
    MASSIVE_ACTIVATIONS,
    LOSS_SPIKE,
    SHARED_MODULES,
)
