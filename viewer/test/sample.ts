/** Makes payloads by hand. */

import { type Payload, readPayload } from "../src/payload";

export type Cells = readonly (number | string | null)[];

export function toBase64(bytes: ArrayBufferLike): string {
  let text = "";
  for (const byte of new Uint8Array(bytes)) text += String.fromCharCode(byte);
  return btoa(text);
}

const numbers: number[] = [];

/** Appends numbers to those of all samples, byte by byte as a payload has them, and says where they begin. */
export function addNumbers(values: Int32Array | Float64Array): number {
  const offset = numbers.length;
  const bytes = new Uint8Array(values.buffer);
  const size = values.BYTES_PER_ELEMENT;
  for (let plane = 0; plane < size; plane++)
    for (let at = plane; at < bytes.length; at += size) numbers.push(bytes[at]);
  return offset;
}

/** The numbers of all samples. */
export function allNumbers(): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(numbers);
}

export function readSample(json: unknown): Payload {
  return readPayload(json, allNumbers());
}

/** Makes the JSON of a table from columns written out as lists; texts get a dictionary of their own. */
export function makeTable(columns: Record<string, Cells>, specs: Record<string, object> = {}, table = "") {
  const dictionaries: Record<string, string[]> = {};
  const rows = Math.max(0, ...Object.values(columns).map((cells) => cells.length));
  const made = Object.entries(columns).map(([name, cells]) => {
    const isText = cells.some((cell) => typeof cell === "string");
    const dictionary = `${table}.${name}`;
    if (isText) dictionaries[dictionary] = [...new Set(cells.filter((cell) => typeof cell === "string"))];
    const values = cells.map((cell) => {
      if (cell === null) return isText ? -1 : NaN;
      return typeof cell === "string" ? dictionaries[dictionary].indexOf(cell) : cell;
    });
    const offset = addNumbers((isText ? Int32Array : Float64Array).from(values));
    const data = isText ? { dictionary, type: "i32", null: -1, offset } : { type: "f64", offset };
    return { name, label: name, kind: isText ? "text" : "number", aggregate: "sum", ...specs[name], data };
  });
  return { table: { rows, columns: made }, dictionaries };
}

/** Makes the JSON of a payload with some tables. */
export function makePayload(
  tables: Record<string, Record<string, Cells>>,
  specs: Record<string, object> = {},
): Record<string, unknown> {
  const parts = Object.entries(tables).map(
    ([name, columns]) => [name, makeTable(columns, specs, name)] as const,
  );
  return {
    version: 3,
    title: "sample",
    dictionaries: Object.assign({}, ...parts.map(([, { dictionaries }]) => dictionaries)) as object,
    tables: Object.fromEntries(parts.map(([name, { table }]) => [name, table])),
  };
}

/** A root with an embedding, two equal blocks of two layers each, and a head; forward and backward. */
export function makeGraph(specs: Record<string, object> = {}) {
  const rows: [
    kind: string,
    label: string,
    parent: number,
    phase: string,
    twin: number | null,
    folded: number | null,
    count: number,
  ][] = [
    ["phase", "forward", -1, "forward", null, null, 1],
    ["module", "Net", 0, "forward", null, null, 1],
    ["module", "embedding", 1, "forward", null, null, 1],
    ["module", "0", 1, "forward", null, null, 2],
    ["op", "mul", 3, "forward", null, null, 2],
    ["op", "add", 3, "forward", null, null, 2],
    ["module", "1", 1, "forward", null, 3, 0],
    ["op", "mul", 6, "forward", null, 4, 0],
    ["op", "add", 6, "forward", null, 5, 0],
    ["module", "head", 1, "forward", null, null, 1],
    ["phase", "backward", -1, "backward", null, null, 1],
    ["module", "Net", 10, "backward", 1, null, 1],
    ["module", "head", 11, "backward", 9, null, 1],
    ["module", "1", 11, "backward", 6, null, 2],
    ["module", "0", 11, "backward", 3, 13, 0],
    ["module", "embedding", 11, "backward", 2, null, 1],
  ];
  const column = <T extends number | string | null>(at: number) => rows.map((row) => row[at] as T);
  return makePayload(
    {
      nodes: {
        kind: column(0),
        label: column(1),
        parent: column(2),
        phase: column(3),
        twin: column(4),
        folded: column(5),
        count: column(6),
        time: [null, null, 1, null, 2, 3, null, 4, 5, 6, null, null, 7, 8, 9, 10],
      },
      edges: { source: [2, 4, 2, 5, 7, 5, 8, 12, 13, 14], target: [4, 5, 5, 7, 8, 8, 9, 13, 14, 15] },
    },
    specs,
  );
}
