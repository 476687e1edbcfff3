"""Architectures of transformers: every tensor that a module returns is measured, and every gradient it gets."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import modtrace
from helpers.architectures import ARCHITECTURES
from helpers.stat_rows import rows


class Counts:
    """The sums of all tensors that modules return and of the gradients those get, by hooks of the test's own."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.gradients: dict[str, list[float]] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                self.outputs.setdefault(name, []).append(tensor.detach().double().sum())
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(name))

        return hook

    def _gradient_hook(self, name: str) -> Any:
        gradients = self.gradients.setdefault(name, [])
        return lambda gradient: gradients.append(gradient.double().sum().item())


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module of transformers returns; of a cache those of its layers."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "self_attention_cache"):
            for cache in (leaf.self_attention_cache, leaf.cross_attention_cache):
                yield from tensors_of(cache)
        elif hasattr(leaf, "layers"):
            for layer in leaf.layers:
                yield from (layer.keys, layer.values)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5", "Mixtral", "ViT"])
def test_every_tensor_and_every_gradient_of_an_architecture_is_measured(seeded, name):
    model, inputs = ARCHITECTURES[name]()
    model.train()
    counts = Counts(model)
    with modtrace.record(model, strict=True) as rec:
        model(**inputs).loss.backward()
    found = rows(rec)
    assert [row.note for row in found if row.note is not None] == []
    assert all(row.count == row_numel(row) for row in found)
    for role, expected in (("output", counts.outputs), ("grad_output", counts.gradients)):
        by_path: dict[str | None, list[float]] = {}
        for row in found:
            if row.role == role and not row.path.startswith("("):  # a loss function that no module has
                by_path.setdefault(row.path, []).append(row.sum)
        expected = {path: sorted(map(float, sums)) for path, sums in expected.items() if sums}
        assert {path: len(sums) for path, sums in by_path.items()} == {
            path: len(sums) for path, sums in expected.items()
        }
        for path, sums in expected.items():
            assert sorted(by_path[path]) == pytest.approx(sums, rel=1e-3, abs=1e-3)
    assert len(counts.gradients) > 5


def row_numel(row: Any) -> int:
    numel = 1
    for size in row.shape:
        numel *= size
    return numel


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_architecture_has_the_gradients_of_the_plain_one(seeded, reentrant):
    plain, inputs = ARCHITECTURES["Llama"]()
    plain.train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients(model: nn.Module) -> dict[Any, float]:
        with modtrace.record(model, strict=True) as rec:
            model(**inputs, use_cache=False).loss.backward()
        assert rec.meta.marks == ()
        found = rows(rec, role="grad_output")
        sites = {(row.path, row.slot): row.sumsq for row in found}
        assert len(sites) == len(found)  # each once
        return sites

    assert gradients(checkpointed) == pytest.approx(gradients(plain), rel=1e-3)


def test_generating_text_records_every_call(seeded):
    model, inputs = ARCHITECTURES["GPT-2"]()
    with modtrace.record(model, strict=True) as rec:
        model.eval().generate(
            inputs["input_ids"],
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=4,
            do_sample=False,
        )
    logits = rows(rec, path="", slot=".logits")
    assert [row.shape[0] for row in logits] == [2, 2, 2, 2]
    assert {row.note for row in rows(rec)} == {None}
