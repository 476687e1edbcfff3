import { expect, test } from "vitest";
import { Model } from "../src/model";
import { sumUp } from "../src/views/sums";
import { makeTracks, rangeOfStep } from "../src/views/tracks";
import { makePayload, readSample } from "./sample";

test("times are summed up by name, cut at the ends of the range, with and without what is inside and measuring", () => {
  const json = makePayload({
    spans: {
      lane: [0, 1, 1, 1, 1, 1],
      kind: ["step", "call", "call", "op", "op", "call"],
      label: ["step 0", "net", "net.fc", "mm", "mm", "net"],
      start: [0, 0, 1, 2, 4, 10],
      duration: [20, 8, 5, 1, 1, 2],
      depth: [0, 0, 1, 2, 2, 0],
      measuring: [null, null, 0.5, null, null, null],
    },
  });
  const model = new Model(readSample(json));
  const sums = (from: number, to: number) =>
    sumUp(makeTracks(model), model.payload.tables.spans, from, to).map(({ label, count, total, own }) => [
      label,
      count,
      total,
      own,
    ]);
  expect(sums(0, 20)).toEqual([["net", 2, 10, 5], ["net.fc", 1, 5, 2.5], ["mm", 2, 2, 2], ["measuring by modtrace", 1, 0.5, 0.5]]); // prettier-ignore
  expect(sums(2.5, 4.5)).toEqual([["net.fc", 1, 2, 1], ["mm", 2, 1, 1], ["net", 1, 2, 0]]); // prettier-ignore
});

test("what ends with the span around it counts as inside, however both are rounded", () => {
  const json = makePayload({
    spans: {
      lane: [1, 1, 1],
      kind: ["call", "call", "call"],
      label: ["net", "net.fc", "next"],
      start: [0.3, 0.4, 0.7],
      duration: [0.3, 0.2, 0.05], // 0.4 + 0.2 > 0.3 + 0.3
      depth: [0, 1, 0],
    },
  });
  const model = new Model(readSample(json));
  const sums = sumUp(makeTracks(model), model.payload.tables.spans, 0, 1);
  expect(sums.map(({ label, own }) => [label, own.toFixed(9)])).toEqual([
    ["net.fc", "0.200000000"],
    ["net", "0.100000000"],
    ["next", "0.050000000"],
  ]);
});

test("the first step begins with its first call, as models are made before, and the others where they begin", () => {
  const json = makePayload({
    spans: { module: [null, null, 0, 0], step: [0, 0, 0, 1], start: [0, 1, 5, 10], duration: [9, 1, 2, 1] },
  });
  const { spans } = new Model(readSample(json)).payload.tables;
  const times = (row: number): [number, number] => {
    const start = spans.number("start", row);
    return [start, start + spans.number("duration", row)];
  };
  expect(rangeOfStep(spans, 0, [0, 1, 2], times)).toEqual([5, 9]);
  expect(rangeOfStep(spans, 1, [0, 1, 2], times)).toEqual([0, 9]);
  expect(rangeOfStep(spans, 0, [0, 1], times)).toEqual([0, 9]);
});
