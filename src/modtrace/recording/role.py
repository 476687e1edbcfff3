"""What a tensor is at its site; the other roles of the schema have no rows yet."""

OUTPUT = "output"
GRAD_OUTPUT = "grad_output"
PARAMETER = "parameter"
PARAMETER_GRAD = "parameter_grad"
