import { expect, test } from "vitest";
import { GraphLayout } from "../src/graph/layout";
import { IN, LevelMaker, OUT } from "../src/graph/levels";
import { partition } from "../src/graph/paint";
import { Model } from "../src/model";
import { makeGraph, makePayload, readSample } from "./sample";

const model = new Model(readSample(makeGraph()));

function layOut(open: number[], unfolded: number[] = [], shown = model): GraphLayout {
  const layout = new GraphLayout(shown);
  layout.place(new Set(open), new Set(unfolded), false, true, true);
  return layout;
}

test("equal siblings are shown as the first of them, with the lines of all", () => {
  const level = new LevelMaker(model).level(1);
  expect([...level.items]).toEqual([2, 3, 9]);
  const lines = [...level.from].map((from, line) => [from, level.to[line]]);
  expect(lines).toEqual([
    [0, 1],
    [1, 2],
  ]);
});

test("unfolded siblings are shown one by one", () => {
  const maker = new LevelMaker(model);
  maker.fold({ unfolded: new Set([3]), showsLeaves: false, showsViews: true });
  expect([...maker.level(1).items]).toEqual([2, 3, 6, 9]);
});

test("lines from outside come in at the border of a group, and lines to outside leave there", () => {
  const level = new LevelMaker(model).level(3);
  const lines = [...level.from].map((from, line) => [from, level.to[line]]);
  expect(lines).toEqual([
    [IN, 0],
    [0, 1],
    [IN, 1],
    [1, OUT],
  ]);
});

test("each item stands below what it reads", () => {
  const layout = layOut([0, 1]);
  expect(layout.y[2] + layout.height[2]).toBeLessThan(layout.y[3]);
  expect(layout.y[3] + layout.height[3]).toBeLessThan(layout.y[9]);
});

test("what opens keeps its corner, nothing before it moves, and what is behind moves by one offset", () => {
  const [closed, opened] = [layOut([0, 1]), layOut([0, 1, 3])];
  expect(opened.position(2)).toEqual(closed.position(2));
  expect(opened.position(3)).toEqual(closed.position(3));
  const [before, after] = [closed.position(9), opened.position(9)];
  expect(after[0]).toBe(before[0]);
  expect(after[1] - before[1]).toBe(opened.height[3] - closed.height[3]);
});

test("a layout that has seen groups open and close is the same as a fresh one", () => {
  const used = layOut([0, 1]);
  for (const open of [
    [0, 1, 3, 10, 11],
    [0, 10],
    [0, 1, 3, 6, 10, 11, 13],
    [0, 1, 10, 11],
  ]) {
    used.place(new Set(open), new Set(), false, true, true);
    const fresh = layOut(open);
    const items = [-1, ...open].flatMap((owner) => [...fresh.levels.level(owner).items]);
    for (const at of ["x", "y", "width", "height"] as const)
      expect(items.map((node) => used[at][node])).toEqual(items.map((node) => fresh[at][node]));
  }
});

test("a backward layer stands beside its forward, in the same row", () => {
  const layout = layOut([0, 1, 3, 10, 11]);
  const top = (node: number) => layout.position(node)[1];
  expect([top(12), top(13), top(15)]).toEqual([top(9), top(3), top(2)]);
  expect(layout.position(13)[0]).toBeGreaterThan(layout.position(3)[0]);
});

test("nothing overlaps, and what is inside a group lies within it", () => {
  const layout = layOut([0, 1, 3, 6, 10, 11], [3]);
  for (const owner of [0, 1, 3, 6, 10, 11]) {
    const items = [...layout.levels.level(owner).items];
    for (const one of items) {
      expect(layout.x[one]).toBeGreaterThanOrEqual(0);
      expect(layout.x[one] + layout.width[one]).toBeLessThanOrEqual(layout.width[owner]);
      expect(layout.y[one] + layout.height[one]).toBeLessThanOrEqual(layout.height[owner]);
      for (const other of items) {
        const isApart =
          layout.x[one] + layout.width[one] <= layout.x[other] ||
          layout.x[other] + layout.width[other] <= layout.x[one] ||
          layout.y[one] + layout.height[one] <= layout.y[other] ||
          layout.y[other] + layout.height[other] <= layout.y[one];
        expect(one === other || isApart).toBe(true);
      }
    }
  }
});

test("a graph without edges, phases or anything known is laid out one below the other", () => {
  const bare = new Model(readSample(makePayload({ nodes: { label: ["a", "b", "c"] } })));
  const layout = layOut([], [], bare);
  expect(layout.y[0]).toBeLessThan(layout.y[1]);
  expect(layout.y[1]).toBeLessThan(layout.y[2]);
});

test("layers that go back to each other in a circle are laid out as if they went back to nothing", () => {
  const columns = {
    kind: ["module", "module", "op", "op"],
    phase: ["forward", "backward", "forward", "backward"],
    parent: [-1, -1, 0, 1],
    twin: [1, 0, null, null],
  };
  const layout = layOut([0, 1], [], new Model(readSample(makePayload({ nodes: columns }))));
  expect([0, 1].map((owner) => [...layout.levels.level(owner).items])).toEqual([[2], [3]]);
});

test("more nodes than a call takes arguments are laid out beside each other", () => {
  const size = 150_000;
  const source = Array.from({ length: size }, (_, at) => at);
  const edges = { source, target: Array<number>(size).fill(size) };
  const layout = layOut([], [], new Model(readSample(makePayload({ nodes: { kind: Array<string>(size + 1).fill("op") }, edges })))); // prettier-ignore
  expect(layout.y[size]).toBeGreaterThan(layout.y[size - 1]);
});

test("a chain of 50,000 ops is laid out", () => {
  const size = 50_000;
  const numbers = (from: number) => Array.from({ length: size - 1 }, (_, at) => at + from);
  const chain = makePayload({
    nodes: { kind: Array<string>(size).fill("op") },
    edges: { source: numbers(0), target: numbers(1) },
  });
  const layout = layOut([], [], new Model(readSample(chain)));
  expect(layout.y[size - 1]).toBe((size - 1) * (layout.height[0] + 26));
});

/** `fc` transposes and multiplies, and its result is viewed and added to; `flatten` only views. */
function makeViews(kind = "data") {
  return new Model(
    readSample(
      makePayload({
        nodes: {
          kind: ["module", "module", "op", "op", "op", "op", "module", "op", "op"],
          label: ["Net", "fc", "t", "mm", "view", "add", "flatten", "view", "sum"],
          parent: [-1, 0, 1, 1, 1, 0, 0, 6, 0],
          phase: Array.from({ length: 9 }, () => "forward"),
          is_view: [0, 0, 1, 0, 1, 0, 0, 1, 0],
        },
        edges: {
          kind: Array.from({ length: 5 }, () => kind),
          source: [2, 3, 4, 5, 7],
          target: [3, 4, 5, 7, 8],
        },
      }),
    ),
  );
}

test("views are left out, what reads one is joined to what it views, and a module that only views stays", () => {
  const maker = new LevelMaker(makeViews());
  const read = (owner: number) => {
    const { items, from, to } = maker.level(owner);
    const end = (each: number) => (each < 0 ? each : items[each]);
    return [[...items], [...from].map((each, line) => [end(each), end(to[line])])];
  };
  expect(maker.viewCount).toBe(2);
  expect(read(1)).toEqual([[3], [[3, OUT]]]);
  expect(read(6)).toEqual([[7], [[IN, 7], [7, OUT]]]); // prettier-ignore
  expect(read(0)).toEqual([[1, 5, 6, 8], [[1, 5], [5, 6], [6, 8]]]); // prettier-ignore
  maker.fold({ unfolded: new Set(), showsLeaves: false, showsViews: true });
  expect(read(1)).toEqual([[2, 3, 4], [[2, 3], [3, 4], [4, OUT]]]); // prettier-ignore
});

test("edges between calls are named as their order", () => {
  expect(makeViews().edgeNames).toEqual(["Reads from", "Read by"]);
  expect(makeViews("next").edgeNames).toEqual(["Called after", "Called before"]);
});

test("values are cut into parts of which none is empty and nothing is lost", () => {
  for (let count = 0; count < 200; count++) {
    const values = Array.from({ length: count }, (_, at) => at);
    for (const most of [1, 24, 49, 60]) {
      const parts = partition(values, most);
      expect(parts.flat()).toEqual(values);
      expect(parts.every((part) => part.length > 0)).toBe(true);
    }
  }
});
