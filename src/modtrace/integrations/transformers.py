"""Records what a Trainer of transformers trains: `Trainer(callbacks=[ModtraceCallback(to="run.modtrace")])`."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..optional import require
from .training_recorder import TrainingRecorder, end_when_raising

_transformers: Any = require("transformers", "modtrace.integrations.transformers")


class ModtraceCallback(TrainingRecorder, _transformers.TrainerCallback):  # type: ignore[misc]  # loaded by `require`
    """Records each `trainer.train()`, with `global_step` and what the Trainer logs as scalars.

    The evaluations in it are recorded as well. `trainer.evaluate()` and `trainer.predict()` by themselves are not.
    """

    def __init__(self, to: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(to, **options)
        _watch_train()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log({"global_step": state.global_step})

    on_prediction_step = on_step_end

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._log(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()


@cache
def _watch_train() -> None:
    """Replaces `Trainer.train` once in a process: there is no event for an exception, and `on_train_end` is left out.

    It is replaced in the class, because a callback is not given its Trainer, and is first called inside of `train`.
    """
    trainer = _transformers.Trainer
    trainer.train = end_when_raising(
        trainer.train, lambda trainer, *_, **__: trainer.callback_handler.callbacks
    )
