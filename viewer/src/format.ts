/** Writes numbers as all of modtrace does (src/modtrace/views/common/numbers.py), so that they agree with `modtrace show`. */

import type { Column } from "./payload";

const TIMES: [number, string][] = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
];
const COUNTS: [number, string][] = [
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "K"],
];
const PREFIXES: [number, string][] = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** Writes a number with three digits, or two and an exponent. A missing one is empty. */
export function formatNumber(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.0009995 || size >= 9999.5) return value.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
  if (size >= 0.9995) return threeDigits(value);
  return value.toFixed(2 - Math.floor(Math.log10(size * 1.0005)));
}

export function formatCount(value: number): string {
  if (Number.isNaN(value)) return "";
  return scaled(value, COUNTS) ?? String(Number(value.toFixed(2)));
}

export function formatBytes(value: number): string {
  return Number.isNaN(value) ? "" : `${withPrefix(value)}B`;
}

export function formatSeconds(value: number): string {
  if (Number.isNaN(value)) return "";
  return scaled(value, TIMES) ?? (value ? `${Math.round(value * 1e9)}ns` : "0us");
}

/** Writes one value of a column. */
export function formatValue(column: Column, value: number): string {
  if (column.dictionary !== null) return column.dictionary[value] ?? "";
  if (Number.isNaN(value)) return "";
  switch (column.spec.kind) {
    case "bytes":
      return formatBytes(value);
    case "seconds":
      return formatSeconds(value);
    case "flops":
      return withPrefix(value);
    case "count":
      return formatCount(value);
    case "ratio":
      return `×${formatNumber(value)}`;
    case "flag":
      return value ? "yes" : "no";
    default:
      return formatNumber(value);
  }
}

/** Writes a number in the largest unit that it reaches, with three digits; null if it reaches none. */
function scaled(value: number, units: readonly [number, string][]): string | null {
  const found = units.find(([size]) => Math.abs(value) >= 0.9995 * size);
  return found ? threeDigits(value / found[0]) + found[1] : null;
}

function withPrefix(value: number): string {
  const found = PREFIXES.find(([size]) => Math.abs(value) >= 0.9995 * size);
  return found ? formatNumber(value / found[0]) + found[1] : String(Math.round(value));
}

function threeDigits(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

/** Writes a number on an axis, without digits that say nothing. */
export function formatTick(value: number): string {
  return /e/.test(formatNumber(value)) ? formatNumber(value) : String(Number(value.toPrecision(4)));
}

/** Shortens a long text in its middle, for a picture or a title. */
export function shorten(text: string, most: number): string {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) / 2);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}

/** What names have in common, without the number in which they differ: `x.layers` of `x.layers[0].keys` and others. */
export function nameTogether(names: readonly string[]): string {
  const [first, ...others] = names;
  let end = first.length;
  for (const name of others) while (!name.startsWith(first.slice(0, end))) end--;
  return first.slice(0, end).replace(/\[\d*$/, "") || first;
}
