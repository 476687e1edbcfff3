"""A recording, typed by hand, of a step that the host issues in 0.6 ms and that a device works on for 9 ms."""

from builders import RecordingBuilder, TypedRecording

US = 1_000


def device_bound(*, with_times: bool = True, ops: bool = True) -> TypedRecording:
    """A forward, its backward and an optimizer's step, each issued long before the device works on it."""
    build = RecordingBuilder(
        argv=("train.py",), options={"device_times": True, "backward_times": True, "ops": ops}
    )

    def at(start_us: int, end_us: int) -> tuple[int, int] | None:
        return (start_us * US, end_us * US) if with_times else None

    net = build.module("", "Net", parameters=200)
    up = build.module("up", "Linear", parent=net, parameters=120)
    act = build.module("act", "GELU", parent=net)
    build.step(0, 0, 600 * US)
    outer = build.call(net, 10 * US, 200 * US, nth=0, device=at(50, 3_050))
    first = build.call(up, 20 * US, 80 * US, parent=outer, nth=0, device=at(60, 2_060))
    second = build.call(act, 90 * US, 150 * US, parent=outer, nth=0, device=at(2_060, 3_040))
    back = build.backward(outer, 210 * US, 400 * US, nth=0, device=at(3_050, 8_050))
    build.backward(first, 300 * US, 400 * US, nth=0, parent=back, device=at(4_050, 8_050))
    build.optimizer(410 * US, 590 * US, device=at(8_050, 9_050))
    if ops:
        build.op(first, "aten.addmm.default", 30 * US, 70 * US, flops=4_000_000_000, device=at(70, 2_050))
        build.op(second, "aten.gelu.default", 100 * US, 140 * US, device=at(2_070, 3_030))
        build.op(outer, "aten.arange.default", 155 * US, 165 * US)
        build.op(back, "aten.mm.default", 320 * US, 380 * US, flops=8_000_000_000, device=at(4_100, 8_000))
    return build.data()
