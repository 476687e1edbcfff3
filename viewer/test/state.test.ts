import { expect, test } from "vitest";
import { decodeState, encodeState, type State } from "../src/state";

const START: State = {
  view: "modules", module: -1, node: -1, site: -1, step: 29, overlay: "time", query: "", open: new Set([0, 1]), each: new Set(),
  graphOpen: new Set(), unfolded: new Set(), columns: null, sort: "", flat: false, backward: true, median: true, role: "", statistic: "rms", pins: [],
  theme: "auto",
}; // prettier-ignore

test("the state at the start has an empty address", () => {
  expect(encodeState(START, START)).toBe("");
});

test("a state is read from its address as it was", () => {
  const state: State = {
    ...START, view: "graph", module: 7, node: 812, step: 3, query: 'path:"a b"&x=1#', open: new Set([5, 3, 100_000]),
    columns: ["time.forward", "RMS"], sort: "-RMS", flat: true, backward: false, median: false, pins: [4, 9], theme: "dark",
  }; // prettier-ignore
  expect(decodeState(`#${encodeState(state, START)}`, START)).toEqual({
    ...state,
    open: new Set([3, 5, 100_000]),
  });
});

test("nothing open is told apart from what is open at the start", () => {
  expect(decodeState(encodeState({ ...START, open: new Set() }, START), START).open).toEqual(new Set());
});

test("an odd address changes nothing", () => {
  expect(decodeState("#view=x&module=1e9&step=&theme=red&open=!&pins=a&flat=", START)).toEqual({
    ...START,
    open: new Set(),
    pins: [],
  });
});
