"""Recordings for tests of the execution graph: lines of what is visible, and random programs of calls and ops."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.graph_view.records import GraphView
from modtrace.api.model_graph import ModelGraph

#: What a program does, and two numbers that say with what.
Action = tuple[str, int, int]
ACTIONS = ("enter", "exit", "op", "view", "pair", "parameter", "outside", "write")
PATHS = (
    "blocks",
    "blocks.0",
    "blocks.1",
    "blocks.2",
    "blocks.0.lin",
    "blocks.1.lin",
    "head",
    "head.deep.part",
)

programs = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40
)


def node_lines(graph: ModelGraph | GraphView) -> list[str]:
    """A line for each visible node: its key, with `×3` behind one that stands for three."""
    return [f"{each.key}{f' ×{each.repeats}' if each.repeats > 1 else ''}" for each in graph.nodes]


def edge_lines(graph: ModelGraph | GraphView) -> list[str]:
    """A line for each visible edge: `input:[0] -> forward/Net/aten.relu.default (self)`, with `×2` for two reads."""
    return [
        f"{graph.nodes[each.source].key} -> {graph.nodes[each.target].key} ({each.slot})"
        f"{f' ×{each.reads}' if each.reads > 1 else ''}{' loop' if each.is_loop else ''}"
        for each in graph.edges
    ]


def box_lines(graph: ModelGraph | GraphView) -> list[str]:
    """A line for each box, indented by the boxes around it."""
    lines: list[str] = []
    depths: list[int] = []
    for each in graph.boxes:
        depths.append(depths[each.box] + 1 if each.box >= 0 else 0)
        lines.append(f"{'  ' * depths[-1]}{each.key}{f' ×{each.repeats}' if each.repeats > 1 else ''}")
    return lines


def run_program(actions: list[Action], *, before: int = 0, pace: int = 1) -> TypedRecording:
    """The recording of a program; it is step 1.

    Args:
        before: things that were recorded before it, so that its ids are others.
        pace: nanoseconds that everything takes.
    """
    build = RecordingBuilder()
    _record_step_before(build, before)
    program = _Program(build, actions, pace)
    program.run_forward()
    program.run_backward()
    return build.data()


def _record_step_before(build: RecordingBuilder, count: int) -> None:
    build.step(0, 0, 1)
    for _ in range(count):
        made = build.op(build.optimizer(0, 1), "aten.ones.default", 0, 1)
        build.tensor([1], producer=made)
        build.site(None, "leaf", f"[{made}]")


@dataclass
class _Program:
    build: RecordingBuilder
    actions: list[Action]
    pace: int
    now: int = 0
    tensors: list[int] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(
        default_factory=list
    )  # with the place in this list of the one around
    stack: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        build = self.build
        self.net = build.module("", "Net")
        self.modules = {"": self.net}
        for path in (*PATHS[:7], "head.deep", PATHS[7]):
            above, _, name = path.rpartition(".")
            type = "Block" if name.isdigit() else name.title()
            self.modules[path] = build.module(path, type, parent=self.modules[above])
        build.step(1, 0, 10_000 * self.pace)

    def run_forward(self) -> None:
        ends = _find_ends(self.actions)
        self._enter("", len(self.actions))
        given = self.build.tensor([2], site=self.build.site(self.net, "input", "[0]"))
        self.tensors.append(given)
        self._op("aten.neg.default", [given])
        for at, (kind, one, other) in enumerate(self.actions):
            if kind == "enter":
                self._enter(PATHS[one % len(PATHS)], ends[at])
            elif kind == "exit" and len(self.stack) > 1:
                self.stack.pop()
            else:
                self._act(kind, self._earlier(one), self._earlier(other), one)
        self.build.use(self.tensors[-1], call=self.calls[0][0], slot="output")

    def _act(self, kind: str, one: int, other: int, number: int) -> None:
        if kind == "op":
            self._op("aten.add.Tensor", [one, other])
        elif kind == "view":
            self._op("aten.view.default", [one], is_view=True)
        elif kind == "pair":
            self._op("aten.chunk.default", [one], returns=("[0]", "[1]"))
        elif kind == "parameter":
            site = self.build.site(self.modules["head"], "parameter", f"weight{number}")
            self._op("aten.mul.Tensor", [one, self.build.tensor([2, 2], site=site)])
        elif kind == "outside":
            self._op("aten.sum.default", [one, one], inside=False)
        elif kind == "write":
            self._op("aten.copy_.default", [one, other], returns=())

    def run_backward(self) -> None:
        """A backward of every call, inside that of the call around it, in reverse."""
        made: dict[int, int] = {}
        order = sorted(range(len(self.calls)), key=lambda each: self._depth_first(each))
        for at in order:
            call, above = self.calls[at]
            parent = made.get(above)
            made[at] = self.build.backward(call, self._tick(), 9_000 * self.pace, parent=parent)
            read = [self.tensors[-1], self.tensors[at % len(self.tensors)]]
            self._op("aten.mul.Tensor", read, call=made[at])

    def _depth_first(self, at: int) -> tuple[int, ...]:
        """Sorts calls so that later ones come first, those around before those inside."""
        way: list[int] = []
        while at >= 0:
            way.append(-at)
            at = self.calls[at][1]
        return tuple(reversed(way))

    def _enter(self, path: str, end: int) -> None:
        above = self.stack[-1] if self.stack else -1
        parent = self.calls[above][0] if above >= 0 else None
        nth = sum(1 for each in self._names if each == path)
        self._names.append(path)
        end_ns = (10 * end + 1_000) * self.pace
        call = self.build.call(self.modules[path], self._tick(), end_ns, parent=parent, nth=nth)
        self.calls.append((call, above))
        self.stack.append(len(self.calls) - 1)

    _names: list[str] = field(default_factory=list)

    def _op(
        self,
        name: str,
        reads: list[int],
        *,
        inside: bool = True,
        call: int | None = None,
        returns: tuple[str, ...] = ("",),
        **more: Any,
    ) -> None:
        if call is None and inside:
            call = self.calls[self.stack[-1]][0]
        start = self._tick()
        op = self.build.op(call, name, start, start + self.pace, flops=1, **more)
        for slot, tensor in zip(("self", "other"), reads, strict=False):
            self.build.use(tensor, op=op, slot=slot)
        self.tensors += [self.build.tensor([2], producer=op, slot=slot) for slot in returns]

    def _earlier(self, number: int) -> int:
        return self.tensors[-1 - number % len(self.tensors)]

    def _tick(self) -> int:
        self.now += 10 * self.pace
        return self.now


def _find_ends(actions: list[Action]) -> dict[int, int]:
    """Where what each action enters is left again."""
    ends: dict[int, int] = {}
    stack: list[int] = []
    for at, (kind, _, _) in enumerate(actions):
        if kind == "enter":
            stack.append(at)
        elif kind == "exit" and stack:
            ends[stack.pop()] = at
    return ends | dict.fromkeys(stack, len(actions))
