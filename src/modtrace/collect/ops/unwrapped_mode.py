"""A dispatch mode that torch's compiler leaves alone: the base of all of ours."""

from torch.utils._python_dispatch import TorchDispatchMode


class UnwrappedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Compiled code stays compiled while it is on. `keep_out_of_dynamo` is for its `__torch_dispatch__`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """With True compiled code stays compiled while the mode is on."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """With True torch wraps `__torch_dispatch__`, for 1.3 us an op, and imports its compiler, for a second."""
        return False
