import { expect, test } from "vitest";
import { Model } from "../src/model";
import { parseNumber, parseQuery, search } from "../src/search";
import { makePayload, readSample } from "./sample";

const model = new Model(
  readSample(
    makePayload({
      modules: {
        path: ["", "layers.0", "layers.0.attn", "layers.1.attn", "head"],
        root: ["Net", "Net", "Net", "Net", "Net"],
        type: ["Net", "Block", "Attention", "Attention", "Linear"],
        parent: [-1, 0, 1, 0, 0],
        time: [0.009, 0.004, 0.0005, 0.002, null],
        nonfinite: [1, 0, 0, 1, 0],
        dtype: ["bfloat16", "bfloat16", "float32", "bfloat16", "float32"],
      },
      nodes: {
        kind: ["module", "op", "op"],
        label: ["attn", "linear", "gelu"],
        name: ["layers.1.attn", "aten.linear.default", "aten.gelu.default"],
        module: [3, 3, 1],
        parent: [-1, 0, -1],
      },
    }),
  ),
);

test.each([
  ["attn", [2, 3], [0, 1]],
  ["path:layers.*.attn", [2, 3], [0, 1]],
  ["time>1ms", [0, 1, 3], []],
  ["time<=0.5ms", [2], []],
  ["dtype:bf16 -nan", [1], []],
  ["nan", [0, 3], []],
  ["type:attention time>1ms", [3], []],
  ["op:linear", [], [1]],
  ["op:aten.*", [], [1, 2]],
  ['"layers.1"', [3], [0, 1]],
  ["nothing", [], []],
])("%s finds modules %j and nodes %j", (query, modules, nodes) => {
  const hits = search(model, query);
  expect([hits.modules, hits.nodes, hits.problem]).toEqual([modules, nodes, ""]);
});

test("a query that cannot be answered says why", () => {
  expect(search(model, "color:red").problem).toBe("This recording has no column color.");
  expect(search(model, "time>fast").problem).toBe(
    "time>fast takes a number, such as 1ms or 2MiB; fast is none.",
  );
});

test("an empty query finds nothing", () => {
  expect(search(model, "  ")).toEqual({ modules: [], nodes: [], problem: "" });
});

test("characters of regular expressions stand for themselves", () => {
  expect(search(model, "path:layers(").modules).toEqual([]);
  expect(search(model, "[a-z]*").modules).toEqual([]);
});

test("numbers are read with their units", () => {
  expect(["1ms", "2MiB", "1.5k", "3", "-2us", "x", "4 parsecs"].map(parseNumber)).toEqual([
    0.001,
    2097152,
    1500,
    3,
    -0.000002,
    NaN,
    NaN,
  ]);
});

test("words in quotes stay together", () => {
  expect(parseQuery('"a b" -c x:"d e"')).toEqual([
    { not: false, key: "", operator: "", value: "a b" },
    { not: true, key: "", operator: "", value: "c" },
    { not: false, key: "x", operator: ":", value: "d e" },
  ]);
});
