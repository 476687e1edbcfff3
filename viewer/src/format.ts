/** Writes numbers as people read them, with their units. */

import type { Column } from "./payload";

const THOUSANDS = ["", "k", "M", "G", "T", "P"];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const TIMES: [number, string][] = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
  [1e-9, "ns"],
];

/** Writes a number with three or four digits that matter. A missing one is empty. */
export function formatNumber(value: number): string {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e5) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

export function formatCount(value: number): string {
  if (Number.isNaN(value)) return "";
  if (Math.abs(value) < 10_000) return String(Number(value.toFixed(2)));
  return scaled(value, 1000, THOUSANDS, "");
}

export function formatBytes(value: number): string {
  return Number.isNaN(value) ? "" : scaled(value, 1024, BYTES, " ");
}

export function formatSeconds(value: number): string {
  if (Number.isNaN(value)) return "";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  const [unit, name] = TIMES.find(([each]) => size >= each) ?? TIMES[TIMES.length - 1];
  return `${Number((value / unit).toPrecision(3))} ${name}`;
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
      return `${scaled(value, 1000, THOUSANDS, " ")}FLOP`;
    case "count":
      return formatCount(value);
    case "flag":
      return value ? "yes" : "no";
    default:
      return formatNumber(value) + (column.spec.unit && ` ${column.spec.unit}`);
  }
}

function scaled(value: number, base: number, units: readonly string[], gap: string): string {
  let at = 0;
  let rest = value;
  while (Math.abs(rest) >= base && at < units.length - 1) {
    rest /= base;
    at += 1;
  }
  return `${Number(rest.toPrecision(3))}${gap}${units[at]}`;
}

/** Shortens a long text in its middle, for a picture or a title. */
export function shorten(text: string, most: number): string {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) / 2);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}
