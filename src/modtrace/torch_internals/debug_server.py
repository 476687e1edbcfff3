"""Adds a page to the debug server of torch.distributed, which is experimental; tried on 2.13.0."""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from .patches import replace


def find_missing_part() -> str | None:
    """Returns what the debug server lacks here; None if it can be started and pages can be added."""
    try:
        from torch._C._distributed_c10d import _register_handler  # noqa: F401
    except ImportError:
        return "this build of torch has no debug server"
    try:
        from torch.distributed.debug._debug_handlers import default_handlers  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "torch":
            return "this version of torch has no debug server"
        return f"the debug server needs {error.name}, which is not installed here"
    except ImportError as error:
        return f"the debug server of this torch cannot be imported: {error}"
    if find_spec("aiohttp") is None and find_spec("requests") is None:
        return "the debug server needs aiohttp, which is not installed here"
    return None


def answer_requests(name: str, answer: Callable[[], str]) -> None:
    """Has the server's thread in this process answer requests of `name`, from now on until the process ends."""
    from torch._C._distributed_c10d import _register_handler

    def handle(request: Any, response: Any) -> None:
        response.set_content(answer(), "text/plain")
        response.set_status(200)

    # C++ releases the function when the process ends, after Python has: to free it there aborts the process (2.13).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    _register_handler(name, handle)


def append_handler(handler: Any, patches: ExitStack) -> None:
    """Appends a handler to the default ones, whose process is started with them, until `patches` is closed."""
    from torch.distributed.debug import _debug_handlers

    default_handlers = _debug_handlers.default_handlers

    def with_ours() -> list[Any]:
        return [*default_handlers(), handler]

    replace(_debug_handlers, "default_handlers", with_ours, patches)


def fetch_from_ranks(name: str, timeout_s: float | None) -> tuple[list[str], list[Any]]:
    """Returns the addresses of all ranks, and their responses with `status_code` and `text`.

    Args:
        name: that of `answer_requests`.
        timeout_s: how long to wait for a rank; None for torch's own time. Torch 2.11 has no time limit.
    """
    from torch.distributed.debug import _frontend

    fetch_all: Any = _frontend.fetch_all
    addresses, responses = fetch_all(name) if timeout_s is None else fetch_all(name, timeout=timeout_s)
    return addresses, list(responses)


def make_route(path: str, handle: Callable[[Any], bytes]) -> Any:
    """Returns the route of a page."""
    from torch.distributed.debug._frontend import Route

    return Route(path, handle)


def make_link(path: str, title: str) -> Any:
    """Returns the link to a page."""
    from torch.distributed.debug._frontend import NavLink

    return NavLink(path, title)
