"""Trains a small GPT-2 by the Trainer of transformers."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import debug_launcher  # noqa: F401
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from helpers.framework_cases import Case, Outcome, failing_at
from modtrace.integrations.transformers import ModtraceCallback

SCALARS = {"loss", "grad_norm", "learning_rate", "epoch"}  # what it logs with a training step
EVALUATION_LOSS = "eval_loss"
RAISED: dict[type[BaseException], type[BaseException]] = {}  # what it raises in place of an exception


def make_trainer(folder: Path, case: Case, callbacks: Sequence[Any] = (), **arguments: Any) -> Trainer:
    set_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if case.fail is not None:
        model.lm_head.register_forward_pre_hook(failing_at(3, case.fail))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (22, 8))]
    chosen = {
        "output_dir": str(folder / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": case.accumulate,
        "eval_strategy": "steps" if case.evaluate else "no",
        "eval_steps": 2,
        "save_strategy": "steps" if case.resume else "no",
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **arguments,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**chosen),
        train_dataset=rows[:16],
        eval_dataset=rows[16:],
        callbacks=list(callbacks),
    )


def train(folder: Path, case: Case, callback: Any = None) -> Outcome:
    if case.resume:
        make_trainer(folder, case, max_steps=2).train()
    trainer = make_trainer(folder, case, [] if callback is None else [callback])
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if case.resume else None)
    return outcome_of(trainer)


def outcome_of(trainer: Trainer) -> Outcome:
    names = ("loss", "eval_loss", "grad_norm")
    losses = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    return Outcome(losses, [parameter.detach().clone() for parameter in trainer.model.parameters()])


def train_rank(folder: Path, case: Case, to: Path | None) -> None:
    """What each of several processes does: only rank 0 fails, and it saves the outcome."""
    warnings.simplefilter("ignore")
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the process which forked
    callbacks = [] if to is None else [ModtraceCallback(to=to)]
    trainer = make_trainer(folder, case._replace(fail=None), callbacks, ddp_find_unused_parameters=False)
    is_first = trainer.args.process_index == 0
    if is_first and case.fail is not None:
        trainer.model.lm_head.register_forward_pre_hook(failing_at(3, case.fail))
    trainer.train()
    if is_first:
        torch.save(tuple(outcome_of(trainer)), folder / "outcome.pt")
