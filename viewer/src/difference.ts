/** How two runs differ: the verdict on each row, and the second run's numbers over the first one's. */

import { formatNumber, formatValue } from "./format";
import type { Model } from "./model";
import { Column, type ColumnSpec } from "./payload";
import { readTheme, type Theme } from "./theme";

/** What the key of a ratio begins with; the name of its column follows. */
const RATIO = "ratio:";
/** Columns whose ratio says nothing: means may be near 0, and what is not finite is no more of it. */
const WITHOUT_RATIO = new Set(["mean", "nonfinite", "infinite"]);
/** The measure of how far the times of several steps lie apart. */
const RANGE = "time range";
/** The share of the modules whose times lie no farther apart than what counts as noise. */
const STEADY = 0.75;
/** The ratios that the table of modules shows at first. */
const SHOWN = new Set(["time", "saved", "RMS"]);

/** The verdicts, as the payload has them, with the name of their colour and a sign for those who see no colours. */
const VERDICTS: Record<string, { color: keyof Theme; sign: string }> = {
  equal: { color: "box", sign: "" },
  "gradients differ": { color: "gradients", sign: "" },
  "inputs differ": { color: "follows", sign: "" },
  "other shape": { color: "reshaped", sign: "≠" },
  changed: { color: "changed", sign: "≠" },
  "changed inside": { color: "inside", sign: "" },
  "only in A": { color: "onlyA", sign: "−" },
  "only in B": { color: "onlyB", sign: "+" },
};

/** The colour of a verdict; a new word is drawn as what was not compared. */
export function verdictColor(text: string): string {
  return readTheme()[VERDICTS[text]?.color ?? "box"];
}

export function verdictSign(text: string): string {
  return VERDICTS[text]?.sign ?? "";
}

/** The second value over the first: NaN where one is not known, or both are 0. */
export function divide(first: number, second: number): number {
  return first < 0 || second < 0 ? NaN : second / first;
}

export function isRatio(key: string): boolean {
  return key.startsWith(RATIO);
}

/** The name of the column whose ratio has a key. */
export function nameOfRatio(key: string): string {
  return key.slice(RATIO.length);
}

/** Describes the ratio of a column; null for a column that has none. */
export function specOfRatio(spec: ColumnSpec): ColumnSpec | null {
  if (
    !spec.measure ||
    spec.measure === RANGE ||
    WITHOUT_RATIO.has(spec.name) ||
    !/^(seconds|bytes|flops|number|count)$/.test(spec.kind)
  )
    return null;
  return {
    ...spec,
    name: RATIO + spec.name,
    label: `${spec.label} B/A`,
    kind: "ratio",
    aggregate: "none",
    about: `That of B over that of A: more than 1 where B has more. ${spec.about}`.trim(),
    measure: "",
    phase: "",
    default: SHOWN.has(spec.measure) && !spec.phase,
    together: false,
  };
}

/**
 * How far a ratio may be from 1 by noise: of times the range of the steps' quartiles, as a part of the medians of both
 * runs, or Infinity where single steps are shown; of all else 0.
 */
export function noiseOfRatio(model: Model, key: string): number {
  const { modules, nodes } = model.payload.tables;
  const columnOf = (measure: string, phase: string) =>
    modules.columns.find(({ spec }) => spec.measure === measure && spec.phase === phase);
  const name = nameOfRatio(key);
  if (!isRatio(key) || (modules.column(name) ?? nodes.column(name))?.spec.kind !== "seconds") return 0;
  const shares = modules.columns.flatMap((range) => {
    const time = range.spec.measure === RANGE && columnOf("time", range.spec.phase);
    const others = time && [range, time].map((each) => model.second("modules", each.spec.name));
    if (!others || !others[0] || !others[1]) return [];
    const [otherRange, otherTime] = others;
    return Array.from(
      { length: modules.rows },
      (_, row) => range.number(row) / time.number(row) + otherRange.number(row) / otherTime.number(row),
    );
  });
  const known = shares.filter((share) => Number.isFinite(share)).sort((a, b) => a - b);
  return known.length ? known[Math.floor(STEADY * (known.length - 1))] : Infinity;
}

/** The ratios of the table of modules. */
export function listRatios(model: Model): Column[] {
  const { modules } = model.payload.tables;
  return modules.columns.flatMap((column) => {
    const second = model.second("modules", column.spec.name);
    const spec = second && column.dictionary === null ? specOfRatio(column.spec) : null;
    if (!spec || !second) return [];
    const isWhole = modules.columns.some(
      (each) => !each.spec.phase && each.spec.measure === column.spec.measure,
    );
    spec.default ||= !isWhole && SHOWN.has(column.spec.measure) && column.spec.phase === "forward";
    return new Column(spec, () =>
      Float64Array.from({ length: modules.rows }, (_, row) => divide(column.number(row), second.number(row))),
    );
  });
}

/** What a row has in the first run; of arguments those that differ in the second. */
export function inFirst(column: Column, second: Column | undefined, row: number): string {
  const text = formatValue(column, column.number(row));
  const other = second && column.spec.name === "args" ? formatValue(second, second.number(row)) : "";
  return other ? keepUnlike(text, other) : text;
}

/** The arguments that another list of arguments lacks or has otherwise; both are JSON. */
function keepUnlike(text: string, other: string): string {
  const read = (json: string): [string, string][] => {
    try {
      const parsed = JSON.parse(json) as Record<string, unknown>;
      return Object.entries(parsed).map(([name, value]) => [name, JSON.stringify(value)]);
    } catch {
      return [["", json]];
    }
  };
  const others = new Map(read(other));
  const unlike = read(text).filter(([name, value]) => others.get(name) !== value);
  return unlike.map(([name, value]) => `${name} ${value}`.trim()).join(", ") || "default";
}

/** What a row has in the second run: a number with its ratio, or a text if that is another one; empty for nothing. */
export function inSecond(column: Column, second: Column | undefined, row: number): string {
  const text = second ? formatValue(second, second.number(row)) : "";
  if (!second || !text) return "";
  if (column.spec.name === "args") return `B ${keepUnlike(text, formatValue(column, column.number(row)))}`;
  const ratio = specOfRatio(column.spec) ? divide(column.number(row), second.number(row)) : NaN;
  return `B ${text}${Number.isNaN(ratio) ? "" : `  ×${formatNumber(ratio)}`}`;
}
