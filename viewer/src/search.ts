/** Searches all modules and nodes: `op:linear path:layers.*.attn dtype:bf16 time>1ms nan`. */

import type { Model } from "./model";
import type { Column, Table } from "./payload";

export interface Hits {
  modules: number[];
  nodes: number[];
  /** What is wrong with the query, in a sentence; empty if nothing. */
  problem: string;
}

interface Term {
  not: boolean;
  key: string;
  operator: string;
  value: string;
}

const UNITS: Record<string, number> = {
  ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1,
  b: 1, kb: 1e3, mb: 1e6, gb: 1e9, kib: 1024, mib: 1024 ** 2, gib: 1024 ** 3,
  k: 1e3, m: 1e6, g: 1e9, t: 1e12,
}; // prettier-ignore
/** Other words for the names of columns. */
const SAME_AS: Record<string, string> = {
  op: "name",
  fqn: "path",
  class: "type",
  t: "time",
  nan: "nonfinite",
};
/** Short names of dtypes. */
const DTYPES: Record<string, string> = {
  bf16: "bfloat16",
  fp16: "float16",
  f16: "float16",
  fp32: "float32",
  f32: "float32",
  fp64: "float64",
  f64: "float64",
};

export function parseQuery(text: string): Term[] {
  const terms: Term[] = [];
  for (const [whole] of text.matchAll(/(?:[^\s"]|"[^"]*")+/g)) {
    const not = whole.startsWith("-") && whole.length > 1;
    const word = (not ? whole.slice(1) : whole).replaceAll('"', "");
    const found = /^([A-Za-z_][\w.]*)(:|>=|<=|>|<|=)(.+)$/.exec(word);
    if (found) terms.push({ not, key: found[1].toLowerCase(), operator: found[2], value: found[3] });
    else terms.push({ not, key: "", operator: "", value: word.toLowerCase() });
  }
  return terms;
}

/** Reads a number with a unit, such as 1ms or 2MiB; NaN if it is none. */
export function parseNumber(text: string): number {
  const found = /^(-?[\d.]+(?:e-?\d+)?)\s*([a-z]*)$/i.exec(text);
  if (!found) return NaN;
  const unit = found[2] ? UNITS[found[2].toLowerCase()] : 1;
  return unit === undefined ? NaN : Number(found[1]) * unit;
}

function globToRegExp(glob: string): RegExp {
  const parts = glob
    .toLowerCase()
    .split("*")
    .map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(glob.includes("*") ? `^${parts.join(".*")}$` : parts[0]);
}

type Test = (row: number) => boolean;

export function search(model: Model, query: string): Hits {
  const terms = parseQuery(query);
  if (!terms.length) return { modules: [], nodes: [], problem: "" };
  const { modules, nodes } = model.payload.tables;
  const tables: [Table, (row: number) => string][] = [
    [modules, (row) => `${model.modulePath(row)} ${modules.text("type", row)}`],
    [nodes, (row) => `${model.nodePath(row)} ${nodes.text("name", row)} ${nodes.text("type", row)}`],
  ];
  const found = tables.map(([table, textOf]) => {
    const tests = terms.map((term) => makeTest(model, table, textOf, term));
    if (tests.some((test) => test === null)) return [];
    const rows: number[] = [];
    for (let row = 0; row < table.rows; row++) if (tests.every((test) => test!(row))) rows.push(row);
    return rows;
  });
  return {
    modules: found[0].filter((row) => !model.hasMembers(row)),
    nodes: found[1],
    problem: findProblem(terms, [modules, nodes]),
  };
}

/** Makes the test of one term, or null if a table has no such column. */
function makeTest(model: Model, table: Table, textOf: (row: number) => string, term: Term): Test | null {
  const test = term.key ? testColumn(model, table, term) : testWord(table, textOf, term.value);
  return test && term.not ? (row) => !test(row) : test;
}

function testWord(table: Table, textOf: (row: number) => string, word: string): Test {
  const nonfinite = table.column("nonfinite");
  if (["nan", "inf", "nonfinite"].includes(word) && nonfinite) return (row) => nonfinite.number(row) > 0;
  if (word.includes("*")) {
    const pattern = new RegExp(globToRegExp(word).source.slice(1, -1));
    return (row) => pattern.test(textOf(row).toLowerCase());
  }
  return (row) => textOf(row).toLowerCase().includes(word);
}

function testColumn(model: Model, table: Table, { key, operator, value }: Term): Test | null {
  if (key === "path" || key === "fqn") {
    const pattern = globToRegExp(value);
    const pathOf = table.name === "modules" ? (row: number) => row : (row: number) => model.moduleOfNode(row);
    return (row) => pattern.test(model.modulePath(pathOf(row)).toLowerCase());
  }
  const column = findColumn(table, key);
  if (!column) return null;
  if (column.dictionary === null) return compareNumbers(column, operator, value);
  const pattern = globToRegExp(DTYPES[value.toLowerCase()] ?? value);
  const isHit = column.dictionary.map((text) => pattern.test(text.toLowerCase()));
  return (row) => isHit[column.number(row)] ?? false;
}

function compareNumbers(column: Column, operator: string, text: string): Test {
  const wanted = parseNumber(text);
  switch (operator) {
    case ">":
      return (row) => column.number(row) > wanted;
    case ">=":
      return (row) => column.number(row) >= wanted;
    case "<":
      return (row) => column.number(row) < wanted;
    case "<=":
      return (row) => column.number(row) <= wanted;
    default:
      return (row) => column.number(row) === wanted;
  }
}

/** Finds a column by its name, its label, or the beginning of one: `time` also finds `time.forward` alone. */
function findColumn(table: Table, key: string): Column | undefined {
  const name = SAME_AS[key] ?? key;
  const plain = (text: string) => text.toLowerCase().replaceAll(/[\s-]/g, "_");
  const columns = table.columns;
  return (
    (key === "op" ? table.column("name") : table.column(key)) ??
    table.column(name) ??
    columns.find(({ spec }) => plain(spec.label) === name) ??
    columns.find(({ spec }) => plain(spec.measure) === name) ??
    columns.find(({ spec }) => plain(spec.name).startsWith(name))
  );
}

function findProblem(terms: readonly Term[], tables: readonly Table[]): string {
  for (const { key, operator, value } of terms) {
    if (!key || key === "path" || key === "fqn") continue;
    const columns = tables.map((table) => findColumn(table, key)).filter((column) => column !== undefined);
    if (!columns.length) return `This recording has no column ${key}.`;
    if (columns.every((column) => column.dictionary === null) && Number.isNaN(parseNumber(value)))
      return `${key}${operator}${value} takes a number, such as 1ms or 2MiB; ${value} is none.`;
  }
  return "";
}
