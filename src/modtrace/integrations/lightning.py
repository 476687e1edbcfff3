"""Records what a Trainer of Lightning fits: `Trainer(callbacks=[ModtraceCallback(to="run.modtrace")])`."""

import multiprocessing
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..optional import require
from .training_recorder import TrainingRecorder, end_when_raising

#: The package by its newer name, or by its older one. A Trainer of either takes the callback.
_NAME = (
    "lightning.pytorch"
    if find_spec("lightning") or not find_spec("pytorch_lightning")
    else "pytorch_lightning"
)

_lightning: Any = require(_NAME, "modtrace.integrations.lightning")


class ModtraceCallback(
    TrainingRecorder,
    _lightning.Callback,  # type: ignore[misc]  # loaded by `require`
    _lightning.loggers.Logger,  # type: ignore[misc]
):
    """Records each `trainer.fit()` from behind the sanity check on, with `global_step` as a scalar.

    It is a Logger, too: `Trainer(callbacks=[recorder], logger=[CSVLogger("logs"), recorder])` adds what is logged to
    the scalars. Validation inside of `fit` is recorded; `trainer.validate()`, `test()` and `predict()` are not.
    """

    def __init__(self, to: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(to, **options)
        self._global_step = 0

    # Methods of a Callback.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Watches the loop in a process that a strategy has started, where Lightning does not call `on_exception`."""
        if stage == "fit" and multiprocessing.parent_process() is not None:
            trainer.fit_loop.run = end_when_raising(trainer.fit_loop.run, lambda: [self])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        self._begin(pl_module)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._global_step != trainer.global_step:  # not of a batch whose gradients are accumulated only
            self._global_step = trainer.global_step
            self._log({"global_step": self._global_step})

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self._log({"global_step": trainer.global_step})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)

    # Methods of a Logger. As the first one it leaves checkpoints where they are without any.

    name = version = ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._log(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass
