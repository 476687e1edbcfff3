import { expect, test } from "vitest";
import { findRange, luminance, NONFINITE, Scale, textOn } from "../src/colors";
import { formatBytes, formatCount, formatNumber, formatSeconds, shorten, nameTogether } from "../src/format";
import { Model } from "../src/model";
import { OverlayMaker } from "../src/overlay";
import { Tree } from "../src/tree";
import { ticks } from "../src/views/chart";
import { makeGraph, makePayload, readSample } from "./sample";

test("numbers are written as modtrace writes them elsewhere", () => {
  expect([0, 0.05341234, 3.4e-7, 123456, -2.5, NaN, Infinity, -Infinity].map(formatNumber)).toEqual([
    "0", "0.0534", "3.4e-07", "1.2e+05", "-2.50", "", "inf", "-inf",
  ]); // prettier-ignore
  expect([0.0449, 9.25e-4, 2e-6, 12, 7.89e-7, 0, NaN].map(formatSeconds)).toEqual([
    "44.9ms", "925us", "2.00us", "12.0s", "789ns", "0us", "",
  ]); // prettier-ignore
  expect([0, 789, 8686080, NaN].map(formatBytes)).toEqual(["0B", "789B", "8.69MB", ""]);
  expect([7, 822912, 1.5e9].map(formatCount)).toEqual(["7", "823K", "1.50B"]);
});

test("long texts are shortened in the middle", () => {
  expect(shorten("blocks.11.attention.output", 11)).toBe("block…utput");
  expect(shorten("short", 11)).toBe("short");
});

test("a scale is by logarithm over more than three decades, and around 0 if values are negative", () => {
  expect(new Scale([[1, 10, NaN, Infinity]]).kind).toBe("linear");
  expect(new Scale([[1e-6, 1, 0]]).kind).toBe("log");
  expect(new Scale([[1, 11]], 10).kind).toBe("log");
  const diverging = new Scale([[-2, 1]]);
  expect([diverging.kind, diverging.low, diverging.high, diverging.place(0)]).toEqual([
    "diverging",
    -2,
    2,
    0.5,
  ]);
  expect(new Scale([[]]).color(NaN)).toBe(NONFINITE);
});

test("text on a colour is the one that is read better", () => {
  expect([textOn("#440154"), textOn("#fde725")]).toEqual(["#ffffff", "#000000"]);
});

test("text has a contrast of 4.5 to 1 on each colour", () => {
  const parts = Array.from({ length: 18 }, (_, at) => (at * 15).toString(16).padStart(2, "0"));
  for (const red of parts)
    for (const green of parts)
      for (const blue of parts) {
        const color = `#${red}${green}${blue}`;
        const [low, high] = [luminance(color), luminance(textOn(color))].sort((a, b) => a - b);
        expect((high + 0.05) / (low + 0.05), color).toBeGreaterThan(4.5);
      }
});

test("ticks are round numbers", () => {
  expect(ticks(0, 100, 5)).toEqual([0, 20, 40, 60, 80, 100]);
  expect(ticks(3, 3, 5)).toEqual([3]);
});

test("a group without a value has the aggregate of what is inside it, as its column says", () => {
  const specs = { most: { aggregate: "max" }, none: { aggregate: "none" } };
  const columns = {
    parent: [-1, 0, 1, 1],
    sum: [null, null, 2, 3],
    most: [null, null, 2, 3],
    none: [null, null, 2, 3],
    known: [9, null, 2, 3],
  };
  const tree = new Tree(readSample(makePayload({ modules: columns }, specs)).tables.modules);
  const values = (name: string) => [...tree.values(tree.table.column(name)!)];
  expect(values("sum")).toEqual([5, 5, 2, 3]);
  expect(values("most")).toEqual([3, 3, 2, 3]);
  expect(values("none")).toEqual([NaN, NaN, 2, 3]);
  expect(values("known")).toEqual([9, 5, 2, 3]);
});

test("several tensors of a structure have the name of what they are in", () => {
  const names = [
    "input['past'].layers[0].keys",
    "input['past'].layers[0].values",
    "input['past'].layers[11].keys",
  ];
  expect(nameTogether(names)).toBe("input['past'].layers");
  expect(nameTogether(["a.layers[10]", "a.layers[11]"])).toBe("a.layers");
  expect(nameTogether(["output[1][0]", "output[1][3]"])).toBe("output[1]");
  expect(nameTogether(["mul", "mul"])).toBe("mul");
  expect(nameTogether(["x", "y"])).toBe("x");
});

test("a parent that is not there, or that comes later, is none", () => {
  const tree = new Tree(readSample(makePayload({ modules: { parent: [1, 7, 1, 3] } })).tables.modules);
  expect([...tree.children(-1)]).toEqual([0, 1, 3]);
  expect([...tree.order]).toEqual([0, 1, 2, 3]);
});

test("a range is found among more values than a call takes arguments", () => {
  const many = Float64Array.from({ length: 300_000 }, (_, at) => at - 1);
  expect(findRange(many, [NaN, Infinity])).toEqual({ low: -1, least: 1, high: 299_998 });
  expect(findRange([], [NaN])).toEqual({ low: 0, least: Infinity, high: 0 });
});

test("a node that stands for its equal siblings has the aggregate of all of them", () => {
  const json = makeGraph({ time: { overlay: true } });
  const overlay = new OverlayMaker(new Model(readSample(json))).get("time", { step: 0, median: false })!;
  expect([3, 4, 5, 9].map((node) => overlay.nodes[node])).toEqual([5, 2, 3, 6]);
  expect([3, 4, 5, 9].map((node) => overlay.folded[node])).toEqual([14, 6, 8, 6]);
});

test("a kind has one number and one colour for modules and nodes, whatever their dictionaries are", () => {
  const json = makePayload(
    {
      modules: { dtype: ["float32", "bfloat16"] },
      nodes: { parent: [-1, 0, 0], dtype: [null, "int64", "bfloat16"] },
    },
    { dtype: { overlay: true } },
  );
  const overlay = new OverlayMaker(new Model(readSample(json))).get("dtype", { step: 0, median: false })!;
  expect([...overlay.modules].map((value) => overlay.text(value))).toEqual(["float32", "bfloat16"]);
  expect([...overlay.nodes].map((value) => overlay.text(value))).toEqual(["", "int64", "bfloat16"]);
});

test("where all is zero, zero has the lowest colour", () => {
  expect(new Scale([[0, 0]]).place(0)).toBe(0);
});

test("what was measured of no module, as a loss, is no choice of colours", () => {
  const sites = { role: ["output", "loss"], module: [0, null] };
  const series = { site: [0, 1], step: [0, 0], rms: [2, 3] };
  const json = makePayload({ modules: { label: ["net"] }, sites, series, series_steps: { step: [0] } });
  const model = new Model(readSample(json));
  expect(new OverlayMaker(model).choices.map((each) => each.key)).toEqual(["@output@rms"]);
  expect(model.statisticsOf("loss").length).toBe(1);
});

test("steps of evaluation are told apart where there are others", () => {
  const read = (kind: (string | null)[]) => new Model(readSample(makePayload({ steps: { kind } })));
  const both = read(["train", "eval", "train", null]);
  expect([0, 1, 2, 3].map((step) => both.isEvaluation(step))).toEqual([false, true, false, false]);
  expect(read(["eval", "eval"]).isEvaluation(0)).toBe(false);
  expect([both.describeRun("values"), both.hasEvaluation]).toEqual(["", true]);
});
