"""The roles of tensors at their sites, in one table that captures, triggers and views read."""

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
    """A role, and the properties of its tensors."""

    name: str
    of_one: str  # what one such tensor is called in a sentence
    of_many: str  # what several are called in a picture
    of_ops: bool = False  # whether the role exists only if ops are recorded
    #: Whether `NonFinite()` checks the role; False where infinities are often intended, as in masks.
    must_be_finite: bool = True


#: All roles; the index of a role is its code while values are collected. Append new roles at the end.
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
    Role(LOSS, "loss", "losses"),  # a tensor of one element with which a backward begins
)

ROLES = tuple(role.name for role in TABLE)
BY_NAME = {role.name: role for role in TABLE}

#: The roles of tensors that ops return or read.
OP_ROLES = frozenset(role.name for role in TABLE if role.of_ops)

#: The roles of parameters, and of tensors that have a parameter's layout.
OF_PARAMETERS = frozenset({PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE})

#: The roles of tensors that should always be finite.
FINITE_ROLES = tuple(role.name for role in TABLE if role.must_be_finite)
