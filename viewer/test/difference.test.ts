import { expect, test } from "vitest";
import { Scale } from "../src/colors";
import {
  divide,
  dropNoise,
  inFirst,
  inSecond,
  inSecondAlone,
  listRatios,
  noiseOfRatio,
  verdictSign,
} from "../src/difference";
import { Model } from "../src/model";
import { OverlayMaker } from "../src/overlay";
import { firstOf } from "../src/views/compared";
import { makePayload, readSample } from "./sample";

const measured = { overlay: true, kind: "seconds", measure: "time" };
const specs = {
  time: measured,
  mean: { overlay: true, kind: "number", measure: "mean" },
  difference: { overlay: true, kind: "difference", measure: "difference", aggregate: "none" },
};

/** Net with fc, which is changed, head, which the first run has alone, and norm, which the second has alone. */
function makeCompared(more: Record<string, unknown> = {}): Model {
  const json = makePayload(
    {
      modules: {
        difference: ["changed inside", "changed", "only in A", "only in B"],
        label: ["Net", "fc", "head", "norm"],
        path: ["Net", "fc", "head", "norm"],
        parent: [null, 0, 0, 0],
        order: [0, 1, 3, 2],
        time: [4, 2, 1, null],
        mean: [1, 1, 1, null],
      },
      second_modules: { label: [null, "linear", null, null], time: [8, 1, null, 5], mean: [3, 3, null, 3] },
      nodes: {
        difference: ["changed", "changed", "equal", "only in B", "inputs differ"],
        kind: ["module", "op", "op", "op", "op"],
        label: ["fc", "mul", "mul", "add", "sub"],
        parent: [null, 0, 0, 0, 0],
        phase: ["forward", "forward", "forward", "forward", "forward"],
        module: [1, 1, 1, 1, 1],
        folded: [null, null, 1, null, null],
        count: [1, 2, 0, 1, 1],
        order: [0, 1, 2, 3, 4],
        time: [null, 2, 3, null, 0],
      },
      second_nodes: { time: [null, 4, 6, 7, 0] },
    },
    specs,
  );
  return new Model(readSample({ ...json, ...more }));
}

const start = { step: 0, median: false };

test("a module that the second run has alone has its numbers there, where they are of the shown step", () => {
  const model = makeCompared();
  const time = model.payload.tables.modules.column("time")!;
  expect([0, 1, 2, 3].map((row) => inSecondAlone(model, time, row, -1))).toEqual(["", "", "", "B 5.00s"]);
  expect(inSecondAlone(model, time, 3, 2)).toBe("B 5.00s");
});

test("a ratio is the second over the first, and blank where one is not known or both are nothing", () => {
  expect([divide(2, 3), divide(2, 0), divide(0, 2), divide(0, 0), divide(NaN, 1), divide(1, NaN)]).toEqual([
    1.5,
    0,
    Infinity,
    NaN,
    NaN,
    NaN,
  ]);
  expect(divide(-1, 2)).toBeNaN();
});

test("the table has a ratio of each measure but of means", () => {
  const ratios = listRatios(makeCompared());
  expect(ratios.map(({ spec }) => spec.label)).toEqual(["time B/A"]);
  expect(ratios[0].spec.default).toBe(false); // it is of one step, so that noise is not known
  expect(listRatios(makeCompared({ medians: "3 steps" }))[0].spec.default).toBe(true);
  expect([0, 1, 2, 3].map((row) => ratios[0].number(row))).toEqual([2, 0.5, NaN, NaN]);
});

test("colours show the ratio of each node, and of what stands for several that of the sums", () => {
  const overlays = new OverlayMaker(makeCompared());
  expect(overlays.choices.slice(0, 2).map(({ key }) => key)).toEqual(["difference", "ratio:time"]);
  const overlay = overlays.get("ratio:time", start)!;
  expect([...overlay.modules]).toEqual([2, 0.5, NaN, NaN]);
  expect([...overlay.nodes].slice(1)).toEqual([2, 2, NaN, NaN]);
  expect(overlay.folded[1]).toBe((4 + 6) / (2 + 3));
  expect(overlay.text(overlay.folded[1])).toBe("×2.00");
});

test("a scale of ratios has the same in its middle, reaches as far both ways, and ends at ten times", () => {
  const scale = (...values: number[]) => new Scale([values], undefined, true);
  expect([scale(1.1).low, scale(1.1).high]).toEqual([0.5, 2]);
  expect([scale(0.25, 3).low, scale(0.25, 3).high]).toEqual([0.25, 4]);
  expect(scale(0.001).high).toBe(10);
  const { place } = scale(1.1);
  expect([1, 0, Infinity, 0.5].map((value) => place.call(scale(1.1), value))).toEqual([0.5, 0, 1, 0]);
  expect(scale(0.25, 3).at(0.5)).toBe(1);
});

/** Modules with their times in forward, how far these lie apart, and the number of steps, of both runs. */
function makeTimed(
  rows: [time: number, range: number, steps: number, timeB: number, rangeB: number][],
): Model {
  const column = (at: number) => rows.map((row) => row[at]);
  const labels = rows.map((_, row) => `m${row}`);
  const of = (measure: string, phase = "forward") => ({ overlay: true, kind: "seconds", measure, phase });
  const json = makePayload(
    {
      modules: {
        label: labels,
        "time.forward": column(0),
        "time_range.forward": column(1),
        "self_time.forward": column(0),
        steps: column(2),
      },
      second_modules: {
        "time.forward": column(3),
        "time_range.forward": column(4),
        "self_time.forward": column(3),
        steps: column(2),
      },
      nodes: {
        kind: [...labels.map(() => "module"), "op"],
        label: [...labels, "mul"],
        parent: [...labels.map(() => null), 0],
        phase: [...labels.map(() => "forward"), "forward"],
        module: [...labels.keys(), 0],
        folded: [...labels.map(() => null), null],
        time: [...labels.map(() => 1), 1],
      },
      second_nodes: { time: [...labels.map(() => 1), 2] },
    },
    {
      "time.forward": of("time"),
      "time_range.forward": of("time range"),
      "self_time.forward": of("self time"),
      time: of("time", ""),
      steps: { kind: "count", measure: "steps" },
    },
  );
  json.medians = "some steps";
  return new Model(readSample(json));
}

test("the time of a quiet module has a colour however far the times of others lie apart", () => {
  const jittery = Array.from({ length: 50 }, (): [number, number, number, number, number] => [
    1, 0.8, 16, 1.3, 0.9,
  ]);
  const model = makeTimed([[10, 0.1, 16, 13, 0.1], ...jittery]);
  const noise = noiseOfRatio(model, "ratio:time.forward")!;
  expect(noise(0)).toBeCloseTo((2.5 / 4) * (0.1 / 10 + 0.1 / 13));
  expect(noise(1)).toBeCloseTo((2.5 / 4) * (0.8 + 0.9 / 1.3));
  expect([dropNoise(1.3, noise(0)), dropNoise(1.3, noise(1))]).toEqual([1.3, 1]);
});

test("what a median may be off shrinks with the number of steps, and is not known of few or without ranges", () => {
  const noise = noiseOfRatio(
    makeTimed([
      [1, 0.4, 4, 1, 0],
      [1, 0.4, 16, 1, 0],
      [1, 0.4, 3, 1, 0],
    ]),
    "ratio:time.forward",
  )!;
  expect([0, 1, 2].map((row) => noise(row))).toEqual([0.5, 0.25, Infinity]);
  expect(noiseOfRatio(makeTimed([[1, 0, 4, 1, 0]]), "ratio:self_time.forward")!(0)).toBe(Infinity);
  expect(noiseOfRatio(makeCompared(), "ratio:time")!(0)).toBe(Infinity);
  expect(noiseOfRatio(makeCompared(), "ratio:mean")).toBeNull();
});

test("a ratio is drawn as 1 where it is no farther from it than noise, both ways", () => {
  expect([1.15, 0.85, 1.3, 0.7].map((value) => dropNoise(value, 0.2))).toEqual([1, 1, 1.3, 0.7]);
  expect([0, 7, Infinity].map((value) => dropNoise(value, Infinity))).toEqual([1, 1, 1]);
  expect([1, 1.01, NaN].map((value) => dropNoise(value, 0))).toEqual([1, 1.01, NaN]);
});

test("in the graph, calls have the ratio of their medians and its noise, and ops no colour", () => {
  const overlay = new OverlayMaker(
    makeTimed([
      [10, 0.1, 16, 15, 0.1],
      [1, 0.8, 16, 1.3, 0.9],
    ]),
  ).get("ratio:time", {
    step: 0,
    median: true,
  })!;
  expect([...overlay.nodes]).toEqual([1.5, 1.3, 2]);
  expect([...overlay.drawn.nodes]).toEqual([1.5, 1, 1]);
  expect(overlay.isNoise).toBe("partly");
  expect(new OverlayMaker(makeCompared()).get("ratio:time", start)!.isNoise).toBe("all");
});

test("modules that the second run has alone stand where they ran", () => {
  const { modules } = makeCompared();
  expect(modules.children(0)).toEqual([1, 3, 2]);
});

test("a call without ops says so where others have some", () => {
  const note = (...kinds: string[]) => {
    const shape = kinds.map(() => "4x8");
    return new Model(readSample(makePayload({ nodes: { kind: kinds, shape } }))).nodeNote(0);
  };
  expect(note("call", "op")).toBe("no ops");
  expect(note("call")).toBe("4x8");
  expect(note("op", "call")).toBe("4x8");
});

test("what has another name in the second run has both", () => {
  const model = makeCompared();
  expect(model.otherName("modules", 1)).toBe("linear");
  expect(model.otherName("modules", 0)).toBe("");
});

test("a value of both runs is told with its ratio, and of arguments those that differ", () => {
  const model = makeCompared();
  const time = model.payload.tables.modules.column("time")!;
  expect(inSecond(time, model.second("modules", "time"), 0)).toBe("B 8.00s  ×2.00");
  expect(inSecond(time, model.second("modules", "time"), 2)).toBe("");
  const noises = [0.5, 1, Infinity].map((noise) =>
    inSecond(time, model.second("modules", "time"), 0, () => noise),
  );
  expect(noises).toEqual(["B 8.00s  ×2.00", "B 8.00s  within noise", "B 8.00s  too few steps to tell noise"]);
  expect(inSecond(time, time, 0)).toBe("");
  const args = {
    nodes: { args: ['{"input":"$input","eps":1e-05}'] },
    second_nodes: { args: ['{"input":"$input","eps":0.01}'] },
  };
  const other = new Model(readSample(makePayload(args)));
  const [one, two] = [other.payload.tables.nodes.column("args")!, other.second("nodes", "args")];
  expect([inFirst(one, two, 0), inSecond(one, two, 0)]).toEqual(["eps 0.00001", "B eps 0.01"]);
});

test("the page opens at the place where the runs part, whose module is that of its op", () => {
  const finding = { title: "the runs part", node: 1, module: -1, step: 0, lines: [] };
  const compared = { names: ["a", "b"], finding: 0 };
  expect(firstOf(makeCompared({ findings: [finding], compared }))).toEqual({ module: 1, node: 1 });
  expect(firstOf(makeCompared({ findings: [{ ...finding, node: -1 }], compared }))).toBeNull();
  expect(firstOf(makeCompared())).toBeNull();
});

test("a verdict that matters has a sign besides its colour, and one of a later version is drawn as unknown", () => {
  expect(["equal", "inputs differ", "changed", "only in A", "only in B", "new"].map(verdictSign)).toEqual([
    "", "", "≠", "−", "+", "",
  ]); // prettier-ignore
});
