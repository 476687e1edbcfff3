/** How two runs differ: the verdict on each row, and the second run's numbers over the first one's. */

import { formatNumber, formatValue } from "./format";
import type { Model } from "./model";
import { Column, type ColumnSpec, type Table } from "./payload";
import { readTheme, type Theme } from "./theme";

/** What the key of a ratio begins with; the name of its column follows. */
const RATIO = "ratio:";
/** Columns whose ratio says nothing: means may be near 0, and what is not finite is no more of it. */
const WITHOUT_RATIO = new Set(["mean", "nonfinite", "infinite", "steps"]);
/** What the measure of how far the times of several steps lie apart ends with. */
const RANGE = " range";
/**
 * Half the notch in a box plot, over the range of the quartiles and the root of the number of steps. 1.57 are usual
 * (McGill, Tukey and Larsen, 1978), by which a sixth of the pairs of three equal steps would differ; so it takes more,
 * and more steps: 1 to 6 % of the pairs of normal and lognormal times then do.
 */
const NOTCH = 2.5;
const LEAST_STEPS = 4;
/** The ratios that the table of modules shows at first; of times if they are medians. */
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

/** The key of the ratio of a column. */
export function keyOfRatio(name: string): string {
  return RATIO + name;
}

/** The name of the column whose ratio has a key. */
export function nameOfRatio(key: string): string {
  return key.slice(RATIO.length);
}

/** Describes the ratio of a column; null for a column that has none. */
export function specOfRatio(spec: ColumnSpec): ColumnSpec | null {
  if (
    !spec.measure ||
    spec.measure.endsWith(RANGE) ||
    WITHOUT_RATIO.has(spec.name) ||
    !/^(seconds|bytes|flops|number|count)$/.test(spec.kind)
  )
    return null;
  return {
    ...spec,
    name: keyOfRatio(spec.name),
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

/** How far the ratio of a row may be from 1 by noise, in a phase or in all of the column. */
export type Noise = (row: number, phase?: string) => number;

/**
 * The noise of the ratios of modules: of times what both medians may be off, from the ranges of each row's own steps, or
 * Infinity where there are too few; null for what has no noise.
 */
export function noiseOfRatio(model: Model, key: string): Noise | null {
  const { modules, nodes, second_modules: others } = model.payload.tables;
  const name = nameOfRatio(key);
  const spec = (modules.column(name) ?? nodes.column(name))?.spec;
  if (!isRatio(key) || spec?.kind !== "seconds") return null;
  return (row, phase = spec.phase) => {
    const noise =
      shareOfNotch(modules, spec.measure, row, phase) + shareOfNotch(others, spec.measure, row, phase);
    return Number.isNaN(noise) ? Infinity : noise;
  };
}

/** What the median of a row's times may be off, as a part of it; NaN if that is not known. */
function shareOfNotch(table: Table, measure: string, row: number, phase: string): number {
  const columns = table.columns.filter(({ spec }) => spec.phase && (!phase || spec.phase === phase));
  let [time, range] = [0, 0];
  for (const column of columns) {
    const ofPhase = column.number(row);
    if (column.spec.measure !== measure || Number.isNaN(ofPhase)) continue;
    const isRange = ({ spec }: Column) =>
      spec.measure === measure + RANGE && spec.phase === column.spec.phase;
    time += ofPhase;
    range += columns.find(isRange)?.number(row) ?? NaN;
  }
  const steps = table.number("steps", row);
  return steps >= LEAST_STEPS ? (NOTCH * range) / time / Math.sqrt(steps) : NaN;
}

/** Ratios as colours show them: 1 where it is noise. */
export function dropNoise(ratio: number, noise: number): number {
  return Math.abs(Math.log(ratio)) <= Math.log1p(noise) ? 1 : ratio;
}

/** The number of a row of modules as its colour shows it. */
export function withoutNoise(model: Model, column: Column, row: number): number {
  const noise = noiseOfRatio(model, column.spec.name);
  return noise ? dropNoise(column.number(row), noise(row)) : column.number(row);
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
    spec.default &&= column.spec.kind !== "seconds" || model.payload.medians !== "";
    return new Column(spec, () =>
      Float64Array.from({ length: modules.rows }, (_, row) => divide(column.number(row), second.number(row))),
    );
  });
}

/** Whether a column has the same text in both runs. */
function isSame(column: Column, second: Column | undefined, row: number): boolean {
  return (
    second !== undefined &&
    formatValue(column, column.number(row)) === formatValue(second, second.number(row))
  );
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

/**
 * What a row has in the second run, if that is another value: a text, or a number with its ratio; of a time that its
 * noise explains, this in place of a ratio. Empty for nothing.
 */
export function inSecond(
  column: Column,
  second: Column | undefined,
  row: number,
  noise: Noise | null = null,
): string {
  const text = second ? formatValue(second, second.number(row)) : "";
  if (!second || !text || isSame(column, second, row)) return "";
  if (column.spec.name === "args") return `B ${keepUnlike(text, formatValue(column, column.number(row)))}`;
  const ratio = specOfRatio(column.spec) ? divide(column.number(row), second.number(row)) : NaN;
  const most = noise ? noise(row) : 0;
  const isNoise = dropNoise(ratio, most) === 1;
  const about = isNoise
    ? most === Infinity
      ? "too few steps to tell noise"
      : "within noise"
    : `×${formatNumber(ratio)}`;
  return `B ${text}${Number.isNaN(ratio) ? "" : `  ${about}`}`;
}

/** What a module has in the second run, if that alone has it; empty for others, and at moments of the first run alone. */
export function inSecondAlone(model: Model, column: Column, row: number, moment: number): string {
  const { name } = column.spec;
  if (model.difference("modules", row) !== "only in B" || (moment >= 0 && model.isKept(name))) return "";
  return inSecond(column, model.second("modules", name), row);
}
