"""What a tensor is at its site."""

INPUT = "input"
OUTPUT = "output"
GRAD_OUTPUT = "grad_output"
GRAD_INPUT = "grad_input"
PARAMETER = "parameter"
PARAMETER_GRAD = "parameter_grad"
BUFFER = "buffer"
OPTIMIZER_STATE = "optimizer_state"
UPDATE = "update"
OP_OUTPUT = "op_output"
LEAF = "leaf"

#: All of them; their place here is their number while values are collected.
ROLES = (
    INPUT,
    OUTPUT,
    GRAD_OUTPUT,
    GRAD_INPUT,
    PARAMETER,
    PARAMETER_GRAD,
    BUFFER,
    OPTIMIZER_STATE,
    UPDATE,
    OP_OUTPUT,
    LEAF,
)

#: Of tensors that ops return or read; only where ops are recorded.
OP_ROLES = frozenset({OP_OUTPUT, LEAF})
