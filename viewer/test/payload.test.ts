import { expect, test } from "vitest";
import { decodePayload } from "../src/payload";
import { addNumbers, allNumbers, makePayload, readSample, toBase64 } from "./sample";

test("a payload is read from base64 of gzip of its length, JSON and numbers", async () => {
  const json = makePayload({ modules: { label: ["GPT", "head"], parent: [-1, 0], time: [2.5, null] } });
  const text = new TextEncoder().encode(JSON.stringify(json));
  const parts = [Uint32Array.of(text.length), text, allNumbers()];
  const packed = new Blob(parts).stream().pipeThrough(new CompressionStream("gzip"));
  const payload = await decodePayload(toBase64(await new Response(packed).arrayBuffer()));
  expect(payload.title).toBe("sample");
  expect(payload.tables.modules.rows).toBe(2);
  expect(payload.tables.modules.text("label", 1)).toBe("head");
  expect(payload.tables.modules.number("time", 0)).toBe(2.5);
  expect(payload.tables.modules.number("time", 1)).toBeNaN();
  expect(payload.missing).toEqual([
    "The table modules has no column path.",
    ...["nodes", "edges", "sites", "series_steps", "steps"].map((name) => `The data has no table ${name}.`),
  ]);
});

test("an unknown value of an integer column is no number, and an unknown text is empty", () => {
  const json = makePayload({ sites: { role: ["output", null], module: [0, 1] } });
  const tables = json.tables as { sites: { columns: { name: string; data: object }[] } };
  tables.sites.columns[1].data = {
    type: "i32",
    null: -1,
    offset: addNumbers(Int32Array.of(4, -1)),
  };
  const { sites } = readSample(json).tables;
  expect(sites.link("module", 0)).toBe(4);
  expect(sites.link("module", 1)).toBe(-1);
  expect(sites.text("role", 1)).toBe("");
});

test("times are read from whole nanoseconds, or from their differences", () => {
  const json = makePayload({ spans: { label: ["a", "b", "c"], start: [0, 0, 0], duration: [0, 0, 0] } });
  const { columns } = (json.tables as { spans: { columns: { data: object }[] } }).spans;
  const add = (...ns: bigint[]) => addNumbers(new Float64Array(BigInt64Array.from(ns).buffer));
  columns[1].data = { type: "ns", rises: true, offset: add(-250000000n, 250000001n, 30000000000000n) };
  columns[2].data = { type: "ns", null: -(2 ** 53), offset: add(5n, -(2n ** 53n), 4294967296n) };
  const { spans } = readSample(json).tables;
  expect([0, 1, 2].map((row) => spans.number("start", row))).toEqual([-0.25, 1e-9, 30000.000000001]);
  expect([0, 1, 2].map((row) => spans.number("duration", row))).toEqual([5e-9, NaN, 4.294967296]);
});

test("a column that cannot be read is left out and told of", () => {
  const json = makePayload({ modules: { label: ["GPT"], time: [1] } });
  const tables = json.tables as { modules: { columns: { data: object }[] } };
  tables.modules.columns[0].data = { type: "i32", offset: allNumbers().length - 3 };
  tables.modules.columns[1].data = { type: "f64" };
  const payload = readSample(json);
  expect(payload.tables.modules.columns).toEqual([]);
  expect(payload.missing).toEqual([
    "Column label of modules cannot be read: it has 0 values for 1 rows.",
    "Column time of modules cannot be read: it has 0 values for 1 rows.",
  ]);
});

test.each([
  [{}],
  [null],
  [{ version: 3, tables: { modules: null, nodes: 3 }, findings: [null], about: ["x"], lanes: [7] }],
])("a payload with nothing in it, or nonsense, opens: %j", (json) => {
  const payload = readSample(json);
  expect(payload.title).toBe("modtrace report");
  expect(payload.tables.nodes.rows).toBe(0);
  expect(payload.tables.steps.text("kind", 3)).toBe("");
});

test("another version is told of", () => {
  expect(readSample({ version: 9 }).missing).toEqual(["The data has version 9; this page reads version 3."]);
});

test("a type that is not known is told of", () => {
  const json = makePayload({ modules: { time: [1, 2], size: [3, 4] } });
  const [, size] = (json.tables as { modules: { columns: { data: object }[] } }).modules.columns;
  size.data = { type: "f16", offset: 0 };
  const payload = readSample(json);
  expect(payload.tables.modules.number("time", 1)).toBe(2);
  expect(payload.missing).toEqual(["Column size of modules cannot be read: its type f16 is unknown."]);
});
