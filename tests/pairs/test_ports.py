"""The ports by hand compute what transformers computes, before a fault is planted."""

import pytest
import torch

from helpers.pairs import seeded
from helpers.ported_pairs import KINDS

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", KINDS)
def test_port_has_the_logits_of_the_original(name: str) -> None:
    kind = KINDS[name]
    model = seeded(kind.make)
    port = kind.port(model.config).load(model)
    with torch.no_grad():
        torch.testing.assert_close(kind.call_port(port), kind.call(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault) for name, kind in KINDS.items() for fault in kind.faults if fault != "untied"],
)
def test_port_with_a_fault_has_other_logits(name: str, fault: str) -> None:
    kind = KINDS[name]
    model = seeded(kind.make)
    port = kind.port(model.config, fault).load(model)
    torch.manual_seed(2)
    with torch.no_grad():
        assert not torch.allclose(kind.call_port(port), kind.call(model), rtol=1e-5, atol=1e-5)
