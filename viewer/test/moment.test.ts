import { expect, test } from "vitest";
import { Model } from "../src/model";
import { OverlayMaker } from "../src/overlay";
import { makePayload, readSample } from "./sample";

/** A root that calls one module once and another one twice, of which the steps 0, 2 and 3 of four are kept. */
function makeRun(medians: string) {
  const time = { measure: "time", kind: "seconds", aggregate: "sum", overlay: true };
  const json = makePayload(
    {
      modules: {
        label: ["net", "once", "twice"],
        parent: [-1, 0, 0],
        time: [9, 1, 8],
        "time.forward": [9, 1, 8],
        parameters: [5, 2, 3],
      },
      nodes: {
        kind: ["phase", "module", "module", "op", "module", "module"],
        label: ["forward", "net", "once", "mul", "twice", "twice"],
        phase: ["forward", "forward", "forward", "forward", "forward", "forward"],
        parent: [-1, 0, 1, 2, 1, 1],
        module: [null, 0, 1, null, 2, 2],
        time: [null, 9, 1, 1, 4, 4],
      },
      steps: { number: [0, 1, 2, 3] },
      module_steps: { step: [0, 2, 3] },
      module_series: {
        time: [90, 19, 10, 10, 11, 1, 80, 8, 9],
        "time.forward": [90, 19, 10, 10, 11, 1, 80, 8, 9],
      },
    },
    { time, "time.forward": { ...time, phase: "forward" } },
  );
  return new Model(readSample({ ...json, shown_step: 3, medians }));
}

test("modules have the numbers of the chosen step, or of the last kept one before it", () => {
  const model = makeRun("");
  const time = model.payload.tables.modules.column("time")!;
  const at = (step: number) => {
    const moment = model.momentOf({ step, median: false });
    return [0, 1, 2].map((row) => model.moduleColumn(time, moment).number(row));
  };
  expect([0, 1, 2, 3].map(at)).toEqual([[90, 10, 80], [90, 10, 80], [19, 11, 8], [9, 1, 8]]); // prettier-ignore
  const parameters = model.payload.tables.modules.column("parameters")!;
  expect(model.moduleColumn(parameters, 0)).toBe(parameters);
});

test("medians are the numbers of the table of modules, and the shown step has numbers of its own beside them", () => {
  const model = makeRun("28 steps, 2 to 29");
  expect(model.momentOf({ step: 0, median: true })).toBe(-1);
  expect(model.momentOf({ step: 3, median: false })).toBe(2);
  expect(model.describeMoment({ step: 3, median: true })).toBe(
    "Times, costs, memory: medians of 28 steps, 2 to 29. Values: step 3.",
  );
  expect(model.describeMoment({ step: 1, median: false })).toBe(
    "Times and values: step 0 (step 1 is not kept). Costs, memory: medians of 28 steps, 2 to 29.",
  );
});

test("a layer has the time of another step if it is the only call of its module, and an op has none", () => {
  const model = makeRun("");
  const maker = new OverlayMaker(model);
  const nodes = (step: number, median = false) => [...maker.get("time", { step, median })!.nodes];
  expect(nodes(3)).toEqual([9, 9, 1, 1, 4, 4]);
  expect(nodes(0)).toEqual([90, 90, 10, NaN, NaN, NaN]);
  const medians = new OverlayMaker(makeRun("3 steps, 0 to 3")).get("time", { step: 3, median: true })!;
  expect([...medians.nodes]).toEqual([9, 9, 1, 1, 4, 4]);
  expect([...medians.modules]).toEqual([9, 1, 8]);
});
