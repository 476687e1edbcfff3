"""Every op of forward, backward and recompute belongs to the module call that an independent walk says."""

import pytest
import torch
import torch.nn.functional as F

from helpers.architectures import ARCHITECTURES
from helpers.comparing import compare
from zoo import TiedGPT


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("additions", [True, False], ids=["with events", "without"])
def test_every_op_of_a_gpt_is_attributed_as_the_graph_says(seeded, reentrant, additions):
    model = TiedGPT()
    tokens = torch.randint(0, 17, (2, 8))

    def run():
        logits = model(tokens, reentrant)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    comparison = compare(model, run, additions=additions)
    if not additions:
        comparison.pairs = [(true._replace(addition=False), said) for true, said in comparison.pairs]
    assert comparison.disagreements() == []
    backward = [true for true, _ in comparison.pairs if true.phase == "backward"]
    assert len(backward) > 250
    assert len({true.parameter for true in backward if true.parameter}) == len(list(model.parameters()))
    if additions:
        assert sum(true.addition for true in backward) > 10
    assert any(true.label is None and "log_softmax_backward" in true.op for true in backward)
    recomputed = sum(true.phase == "recompute" for true, _ in comparison.pairs)
    assert (recomputed > 50) == (reentrant is not None)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_op_of_a_transformer_is_attributed_as_the_graph_says(seeded, name, reentrant):
    model, inputs = ARCHITECTURES[name]()
    model.train()
    if reentrant is not None:
        if not model.supports_gradient_checkpointing:
            pytest.skip(f"{name} offers no gradient checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    comparison = compare(model, lambda: model(**inputs).loss)
    assert comparison.disagreements() == []
    phases = [true.phase for true, _ in comparison.pairs]
    assert phases.count("backward") > 200
    assert (phases.count("recompute") > 50) == (reentrant is not None)
