"""A small run over several steps, typed by hand: what histories and plots of it must show is easy to say."""

from builders import RecordingBuilder, TypedRecording

STEPS = (0, 1, 2)


def typed_run(layers: int = 3, steps: tuple[int, ...] = STEPS, **raw: object) -> TypedRecording:
    """`Net` calls `blocks.0`, `blocks.1` ... in every step; each returns `[i + 1, step]`, its gradient is -1 of that.

    Gradients come in the order of a backward: the last layer first. `blocks.0` has a weight `[3, 4]` that each step
    changes by `[0.3, 0.4]`. `raw` are more columns of the rows of outputs.
    """
    build = RecordingBuilder()
    net = build.module("", "Net")
    blocks = [build.module(f"blocks.{layer}", "Block", parent=net) for layer in range(layers)]
    for step in steps:
        begin = 1000 * step
        build.step(step, begin, begin + 900)
        outer = build.call(net, begin, begin + 500, nth=0)
        calls = [
            build.call(block, begin + 10 * layer + 1, begin + 10 * layer + 9, parent=outer, nth=0)
            for layer, block in enumerate(blocks)
        ]
        for layer, call in enumerate(calls):
            build.output(call, [layer + 1.0, float(step)], **raw)
        for layer, call in reversed(list(enumerate(calls))):
            build.gradient(call, [-layer - 1.0, -float(step)])
        build.parameter(blocks[0], "weight", [3.0, 4.0])
        build.value(build.site(blocks[0], "update", "weight"), [0.3, 0.4], phase="optimizer")
    return build.data()
