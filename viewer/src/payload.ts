/** Reads the payload of a report: one JSON object with tables of columns, and their numbers, compressed. */

export type Kind =
  | "text"
  | "count"
  | "bytes"
  | "seconds"
  | "flops"
  | "number"
  | "flag"
  | "dtype"
  | "phase"
  | "difference"
  | "ratio"
  | "node"
  | "module"
  | "step";
export type Aggregate = "sum" | "max" | "min" | "mean" | "any" | "none";

/** What the payload says of a column. A name that this page does not know is drawn as a number. */
export interface ColumnSpec {
  name: string;
  label: string;
  kind: Kind;
  aggregate: Aggregate;
  about: string;
  /** What is measured, over all phases or in one: "time" in "backward". Empty for what is no measure. */
  measure: string;
  phase: string;
  overlay: boolean;
  /** Whether the tree table shows it at first. */
  default: boolean;
  /** Whether a user has logged it with each step. */
  scalar: boolean;
  /** Whether a row of several equal modules has it over the elements of all. */
  together: boolean;
}

export interface Finding {
  title: string;
  severity: string;
  module: number;
  node: number;
  step: number;
  lines: string[];
}

type Numbers = Float64Array | Float32Array | Int32Array | Uint8Array;

/** One column: numbers, or numbers of texts in a dictionary. What is not known is NaN. */
export class Column {
  private found: Numbers | null = null;

  /** `read` gives the numbers; it is called when the column is first used, since many never are. */
  constructor(
    readonly spec: ColumnSpec,
    private readonly read: () => Numbers,
    readonly dictionary: readonly string[] | null = null,
    readonly unknown: number = NaN,
  ) {}

  get values(): Numbers {
    this.found ??= this.read();
    return this.found;
  }

  number(row: number): number {
    const values = (this.found ??= this.read());
    if (!(row >= 0 && row < values.length)) return NaN;
    const value = values[row];
    return value === this.unknown ? NaN : value;
  }

  text(row: number): string {
    if (this.dictionary === null) return Number.isNaN(this.number(row)) ? "" : String(this.number(row));
    return this.dictionary[this.number(row)] ?? "";
  }
}

/** A table of columns. A column that is missing is undefined, and its texts are empty. */
export class Table {
  private readonly byName: Map<string, Column>;

  constructor(
    readonly name: string,
    readonly rows: number,
    readonly columns: readonly Column[],
  ) {
    this.byName = new Map(columns.map((column) => [column.spec.name, column]));
  }

  column(name: string): Column | undefined {
    return this.byName.get(name);
  }

  text(name: string, row: number): string {
    return this.byName.get(name)?.text(row) ?? "";
  }

  number(name: string, row: number): number {
    return this.byName.get(name)?.number(row) ?? NaN;
  }

  /** The row of another table that a row refers to; -1 for none. */
  link(name: string, row: number): number {
    const value = this.number(name, row);
    return Number.isNaN(value) ? -1 : value;
  }
}

export interface Payload {
  title: string;
  about: [string, string][];
  notes: string[];
  /** The names of the lanes of the timeline. */
  lanes: string[];
  findings: Finding[];
  /** The names of the two runs if the page shows how they differ, and the finding that says it; else null. */
  compared: { names: [string, string]; finding: number; advice: string } | null;
  /** The row of `steps` that modules and nodes tell of. */
  shownStep: number;
  /** The steps of which modules have the median times; empty where these are of the shown step. */
  medians: string;
  tables: Record<TableName, Table>;
  /** What the page could not read or does not know, in sentences. */
  missing: string[];
}

export const TABLES = [
  "modules",
  "module_steps",
  "module_series",
  "nodes",
  "edges",
  "spans",
  "sites",
  "series_steps",
  "series",
  "histograms",
  "bins",
  "steps",
  "parameters",
  "second_modules",
  "second_nodes",
] as const;
export type TableName = (typeof TABLES)[number];

/** The columns without which a table says little. */
const NEEDED: Partial<Record<TableName, readonly string[]>> = {
  modules: ["label", "path", "parent"],
  nodes: ["kind", "label", "parent", "phase", "module"],
  edges: ["source", "target"],
  spans: ["lane", "label", "start", "duration", "depth"],
  sites: ["label", "module", "role"],
  series_steps: ["step"],
  steps: ["number"],
};

/** The version of the payload that this page was written for. */
const VERSION = 3;

/** Reads the text of the page's payload element: base64 of gzip of the length of the JSON, the JSON, and the numbers. */
export async function decodePayload(text: string): Promise<Payload> {
  const stream = new Blob([fromBase64(text.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const end = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const json: unknown = JSON.parse(new TextDecoder().decode(bytes.subarray(4, end)));
  const payload = readPayload(json, bytes.subarray(end));
  payload.missing.push(...tellAbsent(payload.tables));
  return payload;
}

/** Makes a payload of the parsed JSON and the numbers. What is missing or odd is left out, and told in `missing`. */
export function readPayload(json: unknown, numbers: Uint8Array): Payload {
  const raw = asRecord(json);
  const missing: string[] = [];
  if (raw.version !== VERSION)
    missing.push(`The data has version ${String(raw.version)}; this page reads version ${VERSION}.`);
  const dictionaries = asRecord(raw.dictionaries);
  const tables = {} as Record<TableName, Table>;
  for (const name of TABLES)
    tables[name] = readTable(name, asRecord(raw.tables)[name], dictionaries, numbers, missing);
  return {
    title: asText(raw.title) || "modtrace report",
    about: asList(raw.about).map((pair) => [asText(asList(pair)[0]), asText(asList(pair)[1])]),
    notes: asList(raw.notes).map(asText),
    lanes: asList(raw.lanes).map((lane) => asText(asRecord(lane).label)),
    findings: asList(raw.findings).map(readFinding),
    compared: readCompared(asRecord(raw.compared)),
    shownStep: asNumber(raw.shown_step, -1),
    medians: asText(raw.medians),
    tables,
    missing,
  };
}

function readTable(
  name: TableName,
  json: unknown,
  dictionaries: Record<string, unknown>,
  numbers: Uint8Array,
  missing: string[],
): Table {
  if (json === undefined || json === null) return new Table(name, 0, []);
  const raw = asRecord(json);
  const rows = Math.max(0, Math.floor(asNumber(raw.rows, 0)));
  const columns: Column[] = [];
  for (const each of asList(raw.columns)) {
    const spec = readSpec(asRecord(each));
    try {
      columns.push(readColumn(spec, asRecord(asRecord(each).data), rows, dictionaries, numbers));
    } catch (error) {
      missing.push(
        `Column ${spec.label} of ${name} cannot be read: ${error instanceof Error ? error.message : ""}`,
      );
    }
  }
  return new Table(name, rows, columns);
}

/** Says which tables and columns are not there. Python says itself why there is no timeline. */
function tellAbsent(tables: Record<TableName, Table>): string[] {
  return Object.entries(NEEDED).flatMap(([name, needed]) => {
    const table = tables[name as TableName];
    if (!table.columns.length) return name === "spans" ? [] : [`The data has no table ${name}.`];
    const absent = needed.filter((column) => !table.column(column));
    return absent.map((column) => `The table ${name} has no column ${column}.`);
  });
}

function readSpec(raw: Record<string, unknown>): ColumnSpec {
  const name = asText(raw.name);
  return {
    name,
    label: asText(raw.label) || name,
    kind: (asText(raw.kind) || "number") as Kind,
    aggregate: (asText(raw.aggregate) || "none") as Aggregate,
    about: asText(raw.about),
    measure: asText(raw.measure),
    phase: asText(raw.phase),
    overlay: raw.overlay === true,
    default: raw.default === true,
    scalar: raw.scalar === true,
    together: raw.together === true,
  };
}

function readColumn(
  spec: ColumnSpec,
  data: Record<string, unknown>,
  rows: number,
  dictionaries: Record<string, unknown>,
  numbers: Uint8Array,
): Column {
  const type = asText(data.type);
  const size = SIZES[type];
  if (!size) throw new Error(`its type ${type} is unknown.`);
  const offset = asNumber(data.offset, -1);
  const count = offset < 0 ? 0 : Math.floor((numbers.length - offset) / size);
  if (!(count >= rows)) throw new Error(`it has ${Math.max(count, 0)} values for ${rows} rows.`);
  const unknown = asNumber(data.null, NaN);
  const planes = numbers.subarray(offset, offset + rows * size);
  const values = () =>
    type === "ns" ? readTimes(planes, rows, unknown, data.rises === true) : readNumbers(type, planes, rows);
  if (data.dictionary === undefined) return new Column(spec, values, null, unknown);
  const texts = dictionaries[asText(data.dictionary)];
  if (!Array.isArray(texts)) throw new Error(`its dictionary ${asText(data.dictionary)} is not there.`);
  return new Column(spec, values, texts.map(asText), unknown);
}

/** How many bytes a number of each type takes. */
const SIZES: Record<string, number> = { f64: 8, f32: 4, i32: 4, u8: 1, ns: 8 };

/** Puts the bytes of each number together: the lowest ones of all numbers come first, then the next ones. */
function readNumbers(type: string, planes: Uint8Array, rows: number): Numbers {
  if (type === "u8") return planes;
  const words = SIZES[type] / 4;
  const joined = new Uint32Array(rows * words);
  for (let word = 0; word < words; word++) {
    const [a, b, c, d] = [0, 1, 2, 3].map((plane) => planes.subarray((4 * word + plane) * rows));
    for (let row = 0, to = word; row < rows; row++, to += words)
      joined[to] = a[row] | (b[row] << 8) | (c[row] << 16) | (d[row] << 24);
  }
  if (type === "i32") return new Int32Array(joined.buffer);
  return type === "f32" ? new Float32Array(joined.buffer) : new Float64Array(joined.buffer);
}

/** Returns seconds of whole nanoseconds, of which each may be given as the difference to the one before. */
function readTimes(planes: Uint8Array, rows: number, unknown: number, rises: boolean): Float64Array {
  const words = new Int32Array(readNumbers("f64", planes, rows).buffer);
  const seconds = new Float64Array(rows);
  for (let row = 0, before = 0; row < rows; row++) {
    const ns = words[2 * row + 1] * 2 ** 32 + (words[2 * row] >>> 0);
    before = rises ? before + ns : ns;
    seconds[row] = ns === unknown ? NaN : before / 1e9;
  }
  return seconds;
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> };
  if (native.fromBase64) return native.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

function readFinding(json: unknown): Finding {
  const raw = asRecord(json);
  return {
    title: asText(raw.title),
    severity: asText(raw.severity) || "note",
    module: asNumber(raw.module, -1),
    node: asNumber(raw.node, -1),
    step: asNumber(raw.step, -1),
    lines: asList(raw.lines).map(asText),
  };
}

function readCompared(raw: Record<string, unknown>): Payload["compared"] {
  const [one, other] = asList(raw.names).map(asText);
  return other === undefined
    ? null
    : { names: [one, other], finding: asNumber(raw.finding, -1), advice: asText(raw.advice) };
}

function asRecord(json: unknown): Record<string, unknown> {
  return typeof json === "object" && json !== null ? (json as Record<string, unknown>) : {};
}

function asList(json: unknown): unknown[] {
  return Array.isArray(json) ? json : [];
}

function asText(json: unknown): string {
  return json === undefined || json === null ? "" : String(json);
}

function asNumber(json: unknown, otherwise: number): number {
  return typeof json === "number" && !Number.isNaN(json) ? json : otherwise;
}
