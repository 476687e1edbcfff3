import { expect, test } from "vitest";
import { decodePayload, readPayload } from "../src/payload";
import { makePayload, toBase64 } from "./sample";

test("a payload is read from base64 of gzip of JSON", async () => {
  const json = makePayload({ modules: { label: ["GPT", "head"], parent: [-1, 0], time: [2.5, null] } });
  const packed = new Blob([JSON.stringify(json)]).stream().pipeThrough(new CompressionStream("gzip"));
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
    base64: toBase64(Int32Array.of(4, -1).buffer),
  };
  const { sites } = readPayload(json).tables;
  expect(sites.link("module", 0)).toBe(4);
  expect(sites.link("module", 1)).toBe(-1);
  expect(sites.text("role", 1)).toBe("");
});

test("a column that cannot be read is left out and told of", () => {
  const json = makePayload({ modules: { label: ["GPT"], time: [1] } });
  const tables = json.tables as { modules: { rows: number } };
  tables.modules.rows = 2;
  const payload = readPayload(json);
  expect(payload.tables.modules.columns).toEqual([]);
  expect(payload.missing).toEqual([
    "Column label of modules cannot be read: it has 1 values for 2 rows.",
    "Column time of modules cannot be read: it has 1 values for 2 rows.",
  ]);
});

test.each([
  [{}],
  [null],
  [{ version: 1, tables: { modules: null, nodes: 3 }, findings: [null], about: ["x"], lanes: [7] }],
])("a payload with nothing in it, or nonsense, opens: %j", (json) => {
  const payload = readPayload(json);
  expect(payload.title).toBe("modtrace report");
  expect(payload.tables.nodes.rows).toBe(0);
  expect(payload.tables.steps.text("kind", 3)).toBe("");
});

test("another version is told of", () => {
  expect(readPayload({ version: 9 }).missing).toEqual(["The data has version 9; this page reads version 1."]);
});

test("numbers that are no base64 are unknown, and a type that is not known is told of", () => {
  const json = makePayload({ modules: { time: [1, 2], size: [3, 4] } });
  const [time, size] = (json.tables as { modules: { columns: { data: object }[] } }).modules.columns;
  time.data = { type: "f64", base64: "!".repeat(22) + "==" };
  size.data = { type: "f16", base64: "" };
  const payload = readPayload(json);
  expect(payload.tables.modules.number("time", 0)).toBeNaN();
  expect(payload.missing).toEqual(["Column size of modules cannot be read: its type f16 is unknown."]);
});
