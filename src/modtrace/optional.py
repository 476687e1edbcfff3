"""Imports of libraries that modtrace can do without, with an error that says how to get them."""

import importlib
from types import ModuleType

from .errors import MissingLibraryError

_HOW_TO_GET = {
    "torch": "Recording runs inside PyTorch. Install the build for your machine (https://pytorch.org), "
    "or any build with `pip install 'modtrace[torch]'`.",
    "matplotlib": "Install it with `pip install 'modtrace[plot]'`, "
    "or draw the numbers yourself: rec.history(...) in Python, modtrace plot --json on the command line.",
    "polars": "Install it with `pip install polars`, or use .table(...), which gives Arrow tables.",
    "tensorboard": "Install it with `pip install 'modtrace[tensorboard]'`.",
    "duckdb": "Install it with `pip install 'modtrace[query]'`.",
    "fsspec": "Install it with `pip install 'modtrace[query]'`, with the library of the protocol, such as s3fs.",
    "pyspark": "Install it with `pip install 'modtrace[spark]'`, and a JVM.",
    "sqlglot": "Install it with `pip install 'modtrace[spark]'`.",
    "transformers": "Install it with `pip install 'modtrace[transformers]'`.",
    "lightning": "Install it with `pip install 'modtrace[lightning]'`.",
    "pandas": "Install it with `pip install 'modtrace[frame]'`, or use .table(...), which needs no pandas.",
}


def require(name: str, what_for: str) -> ModuleType:
    """Imports the library `name`.

    Args:
        name: the import name of the library, or of a module in it.
        what_for: what the caller wants it for, as the start of a sentence: "modtrace.record()".

    Raises:
        MissingLibraryError: it is not installed; the text says how to get it.
    """
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != library:
            raise
        raise MissingLibraryError(
            f"{what_for} needs {library}, which is not installed here. {_HOW_TO_GET[library]}", name=library
        ) from error
