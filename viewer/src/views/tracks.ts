/** The lanes of the timeline, and what helps to draw the spans in them. */

import type { Model } from "../model";
import type { Table } from "../payload";

/** How the picture is moved. */
export const HOW = "Wheel zooms, drag moves, drag with shift sums up, click selects.";

export const ROW = 18;
export const TOP = 24;
export const TRACK_GAP = 10;

export interface Track {
  label: string;
  y: number;
  rows: number;
  /** The spans of each depth, in order of their start. */
  spans: number[][];
}

/** The label if it fits, else its last part, or the beginning of that. */
export function fitLabel(label: string, room: number): string {
  if (label.length <= room) return label;
  const last = label.slice(label.lastIndexOf(".") + 1);
  return last.length <= room ? last : `${last.slice(0, Math.max(1, room - 1))}…`;
}

export function makeTracks(model: Model): Track[] {
  const { spans } = model.payload.tables;
  const byLane = new Map<number, number[][]>();
  for (let row = 0; row < spans.rows; row++) {
    const lane = Math.max(0, spans.link("lane", row));
    const depth = Math.max(0, spans.link("depth", row));
    let depths = byLane.get(lane);
    if (!depths) byLane.set(lane, (depths = []));
    (depths[depth] ??= []).push(row);
  }
  const starts = spans.column("start");
  let y = TOP + TRACK_GAP;
  return [...byLane.keys()]
    .sort((a, b) => a - b)
    .map((lane) => {
      const depths = Array.from(byLane.get(lane)!, (rows) => rows ?? []);
      for (const rows of depths) rows.sort((a, b) => (starts?.number(a) ?? 0) - (starts?.number(b) ?? 0));
      const track = {
        label: model.payload.lanes[lane] || `lane ${lane}`,
        y,
        rows: depths.length,
        spans: depths,
      };
      y += depths.length * ROW + TRACK_GAP;
      return track;
    });
}

export function rangeOf(count: number, times: (at: number) => [number, number]): [number, number] {
  let from = Infinity;
  let to = -Infinity;
  for (let at = 0; at < count; at++) {
    const [start, end] = times(at);
    if (start < from) from = start;
    if (end > to) to = end;
  }
  return from <= to ? [from, to] : [0, 1];
}

/** The first row whose key is at least a value; the keys grow. */
export function firstAfter(rows: readonly number[], key: (row: number) => number, value: number): number {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(rows[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The range of the spans of a step; that of step 0, in which models are made, begins with its first call. */
export function rangeOfStep(
  spans: Table,
  number: number,
  rows: readonly number[],
  times: (row: number) => [number, number],
): [number, number] {
  const range = rangeOf(rows.length, (at) => times(rows[at]));
  const calls = number === 0 ? rows.filter((row) => spans.link("module", row) >= 0) : [];
  return calls.length ? [rangeOf(calls.length, (at) => times(calls[at]))[0], range[1]] : range;
}
