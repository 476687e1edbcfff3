"""Rules of how modules of one recording are called in the other, given and proposed."""

from collections.abc import Sequence

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.alignment.align import align

#: Of a block: name, type, parameters, and the shapes of output and weight.
_PARTS = (
    ("ln_1", "LayerNorm", 8, (2, 4), (4,)),
    ("attn.c_attn", "Conv1D", 60, (2, 12), (4, 12)),
    ("attn.c_proj", "Conv1D", 20, (2, 4), (4, 4)),
    ("mlp.c_fc", "Conv1D", 80, (2, 16), (4, 16)),
)
_PORT = (
    ("norm", "LayerNorm", 8, (2, 4), (4,)),
    ("attn.qkv", "Linear", 60, (2, 12), (12, 4)),
    ("attn.proj", "Linear", 20, (2, 4), (4, 4)),
    ("up", "Linear", 80, (2, 16), (16, 4)),
)
_SPLIT = (
    ("norm", "LayerNorm", 8, (2, 4), (4,)),
    ("attn.q", "Linear", 20, (2, 4), (4, 4)),
    ("attn.k", "Linear", 20, (2, 4), (4, 4)),
    ("attn.v", "Linear", 20, (2, 4), (4, 4)),
    ("attn.proj", "Linear", 20, (2, 4), (4, 4)),
    ("up", "Linear", 80, (2, 16), (16, 4)),
)

_RULES = (
    r"h\.(\d+)=blocks.\1",
    r"h\.(\d+)\.ln_1=blocks.\1.norm",
    r"h\.(\d+)\.attn\.c_attn=blocks.\1.attn.qkv",
    r"h\.(\d+)\.attn\.c_proj=blocks.\1.attn.proj",
    r"h\.(\d+)\.mlp\.c_fc=blocks.\1.up",
)

_Part = tuple[str, str, int, tuple[int, ...], tuple[int, ...]]


def _model(stack: str, parts: Sequence[_Part], *, layers: int = 2) -> TypedRecording:
    build = RecordingBuilder()
    net = build.module("", "Net", parameters=1000)
    around = {"": net, stack: build.module(stack, "ModuleList", parent=net, parameters=1000)}
    build.step(0, 0, 10_000)
    outer = build.call(net, 0, 10_000, nth=0)
    at = 0
    for layer in range(layers):
        block = f"{stack}.{layer}"
        around[block] = build.module(block, "Block", parent=around[stack], parameters=500)
        call = build.call(around[block], at + 1, at + 900, parent=outer, nth=0)
        for name, type_name, parameters, output, weight in parts:
            path = f"{block}.{name}"
            above = path.rpartition(".")[0]
            if above not in around:
                around[above] = build.module(above, "Part", parent=around[block], parameters=100)
            module = build.module(path, type_name, parent=around[above], parameters=parameters)
            at += 20
            inner = build.call(module, at, at + 10, parent=call, nth=0)
            build.output(inner, None, shape=output, dtype="float32")
            build.parameter(module, "weight", None, shape=weight, dtype="float32")
        at += 1000
    return build.data()


def test_rules_pair_modules_that_have_other_names() -> None:
    found = align(_model("h", _PARTS), _model("blocks", _PORT), rules=_RULES)
    assert [(one.path, other.path) for one, other in found.modules][:4] == [
        ("", ""),
        ("h.0", "blocks.0"),
        ("h.0.ln_1", "blocks.0.norm"),
        ("h.0.attn", "blocks.0.attn"),
    ]
    assert len(found.values) == 16
    assert len(found.missing.values) == len(found.extra.values) == 0


def test_weights_of_a_conv1d_are_transposed_the_square_ones_too() -> None:
    found = align(_model("h", _PARTS, layers=1), _model("blocks", _PORT, layers=1), rules=_RULES)
    transposed = [found.axes[code] if code >= 0 else None for code in found.permuted.tolist()]
    assert transposed == [None, None, None, (1, 0), None, (1, 0), None, (1, 0)]


def test_rules_are_proposed_as_map_takes_them() -> None:
    one, other = _model("h", _PARTS), _model("blocks", _PORT)
    found = align(one, other)
    assert found.rules == ()
    assert found.proposed == (
        "h=blocks",
        r"h\.(\d+)\.ln_1=blocks.\1.norm",
        r"h\.(\d+)\.attn\.c_attn=blocks.\1.attn.qkv",
        r"h\.(\d+)\.attn\.c_proj=blocks.\1.attn.proj",
        r"h\.(\d+)\.mlp\.c_fc=blocks.\1.up",
    )
    assert len(align(one, other, rules=found.proposed).values) == 16
    assert align(one, other, rules=["auto"]).rules == found.proposed


def test_three_projections_are_joined_to_the_fused_one() -> None:
    rule = r"blocks\.(\d+)\.attn\.(q|k|v)=blocks.\1.attn.qkv"
    found = align(_model("blocks", _SPLIT, layers=1), _model("blocks", _PORT, layers=1), rules=[rule])
    parts = list(zip(found.joined.dimension.tolist(), found.joined.offset.tolist(), strict=True))
    assert sorted(parts) == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8)]
    assert not found.joined.whole_in_a.any()
    assert found.missing.values.count() == {"joined": 6}
    assert found.extra.values.count() == {"joined": 2}


def test_fused_projection_of_transposed_weights_is_joined_from_transposed_parts() -> None:
    rules = [*_RULES, *(rf"h\.(\d+)\.attn\.c_attn=blocks.\1.attn.{each}" for each in "qkv")]
    rules.remove(r"h\.(\d+)\.attn\.c_attn=blocks.\1.attn.qkv")
    found = align(_model("h", _PARTS, layers=1), _model("blocks", _SPLIT, layers=1), rules=rules)
    assert found.joined.whole_in_a.all()
    joined = found.joined
    by_whole = np.stack([joined.whole, joined.dimension, joined.permuted], axis=1).tolist()
    assert by_whole == [[2, 1, -1]] * 3 + [[3, 1, 0]] * 3


def test_rules_for_parts_are_proposed() -> None:
    assert align(_model("blocks", _SPLIT), _model("blocks", _PORT)).proposed == (
        r"blocks\.(\d+)\.attn\.q=blocks.\1.attn.qkv",
        r"blocks\.(\d+)\.attn\.k=blocks.\1.attn.qkv",
        r"blocks\.(\d+)\.attn\.v=blocks.\1.attn.qkv",
    )


def test_nothing_is_proposed_where_parameters_differ() -> None:
    other = [(f"x_{name}", kind, count + 1, out, weight) for name, kind, count, out, weight in _PARTS]
    assert align(_model("h", _PARTS), _model("h", other)).proposed == ()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nowhere=blocks", "map='nowhere=blocks' matches no module of the first recording"),
        (r"h\.(\d+)=layers.\1", "makes the path 'layers.0', which the second recording does not have"),
        ("blocks", "map='blocks' is no rule: give EXPRESSION=PATH"),
        ("(=a", "map='(=a' cannot be read: missing )"),
        (r"h=\1", r"map='h=\\1' cannot be read: invalid group reference 1"),
        (
            r"h\.\d\.ln_1=blocks.0.norm",
            "make 'h.0.ln_1' and 'h.1.ln_1' one with 'blocks.0.norm', and they are not",
        ),
    ],
)
def test_rule_that_cannot_be_meant_is_refused(rule: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        align(_model("h", _PARTS), _model("blocks", _PORT), rules=[rule])
    assert message in str(raised.value)


def test_ops_of_parts_are_no_ops_of_the_whole() -> None:
    def run(*names: str) -> TypedRecording:
        build = RecordingBuilder()
        net = build.module("", "Net", parameters=60)
        build.step(0, 0, 1000)
        outer = build.call(net, 0, 900, nth=0)
        for at, name in enumerate(names):
            module = build.module(name, "Linear", parent=net, parameters=60 // len(names))
            build.op(
                build.call(module, 100 * at, 100 * at + 50, parent=outer, nth=0),
                "aten.addmm.default",
                100 * at,
                1,
            )
        return build.data()

    found = align(run("q", "k", "v"), run("qkv"), rules=["(q|k|v)=qkv"])
    assert len(found.ops) == 0
    assert found.missing.ops.count() == {"joined": 3}
    assert found.extra.ops.count() == {"joined": 1}
