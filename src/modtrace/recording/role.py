"""The roles that a tensor may have at its site, in one table that captures, triggers and views read."""

from typing import NamedTuple

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
LOSS = "loss"


class Role(NamedTuple):
    """The properties of the tensors of a role."""

    name: str
    of_one: str  # the name of one such tensor in a sentence
    of_many: str  # the name of several in a picture
    of_ops: bool = False  # exists only if ops are recorded
    #: False: infinities are often intended, as in masks, so `NonFinite()` does not check them.
    must_be_finite: bool = True


#: All roles. Their index is their code while values are collected. A new role goes to the end.
TABLE = (
    Role(INPUT, "input", "inputs", must_be_finite=False),
    Role(OUTPUT, "output", "outputs"),
    Role(GRAD_OUTPUT, "gradient of the output", "gradients at outputs"),
    Role(GRAD_INPUT, "grad_input", "gradients at inputs"),
    Role(PARAMETER, "parameter", "parameters"),
    Role(PARAMETER_GRAD, "gradient of the parameter", "gradients of parameters"),
    Role(BUFFER, "buffer", "buffers", must_be_finite=False),
    Role(OPTIMIZER_STATE, "optimizer_state", "optimizer states"),
    Role(UPDATE, "update", "updates of parameters"),
    Role(OP_OUTPUT, "op_output", "outputs of ops", of_ops=True, must_be_finite=False),
    Role(LEAF, "leaf", "leaves", of_ops=True, must_be_finite=False),
    Role(LOSS, "loss", "losses"),  # a root of a backward that has one element
)

ROLES = tuple(role.name for role in TABLE)
BY_NAME = {role.name: role for role in TABLE}

#: The roles of tensors that ops return or read, which exist only if ops are recorded.
OP_ROLES = frozenset(role.name for role in TABLE if role.of_ops)

#: The roles of parameters, and of what has the layout of a parameter.
OF_PARAMETERS = frozenset({PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE})

#: The roles of tensors that should never have a value that is not finite.
FINITE_ROLES = tuple(role.name for role in TABLE if role.must_be_finite)
