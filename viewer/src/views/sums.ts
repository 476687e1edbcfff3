/** Sums of the times of spans in a range, by lane and name. */

import { textTable } from "../dom";
import { formatSeconds } from "../format";
import type { Table } from "../payload";
import { firstAfter, type Track } from "./tracks";

/** How many sums are listed. */
const MOST_SUMS = 40;
/** What the time is called in which modtrace measured values. */
const MEASURING = "measuring by modtrace";

export interface Sum {
  label: string;
  lane: string;
  count: number;
  /** Seconds within the range, and without what is inside. */
  total: number;
  own: number;
}

/** Sums up the spans of calls and ops that lie in a range, the longest first by the time without what is inside. */
export function sumUp(tracks: readonly Track[], spans: Table, from: number, to: number): Sum[] {
  const sums = new Map<string, Sum>();
  const end = (row: number) => spans.number("start", row) + (spans.number("duration", row) || 0);
  // What is inside may end with it, and is rounded otherwise: its middle tells where it belongs.
  const middle = (row: number) => (spans.number("start", row) + end(row)) / 2;
  const inRange = (start: number, last: number) => Math.max(0, Math.min(last, to) - Math.max(start, from));
  const ofSpan = (row: number) => inRange(spans.number("start", row), end(row));
  const add = (label: string, lane: string, total: number, own: number) => {
    const key = `${lane}\n${label}`;
    const sum = sums.get(key) ?? { label, lane, count: 0, total: 0, own: 0 };
    sums.set(key, { ...sum, count: sum.count + 1, total: sum.total + total, own: sum.own + own });
  };
  for (const { label: lane, spans: depths } of tracks)
    depths.forEach((rows, depth) => {
      const inside = depths[depth + 1] ?? [];
      let next = firstAfter(inside, end, from);
      for (let at = firstAfter(rows, end, from); at < rows.length; at++) {
        const row = rows[at];
        if (spans.number("start", row) > to) break;
        let within = 0;
        for (; next < inside.length && middle(inside[next]) <= end(row); next++)
          within += ofSpan(inside[next]);
        if (spans.text("kind", row) === "step") continue;
        const measuring = inRange(end(row) - (spans.number("measuring", row) || 0), end(row));
        add(spans.text("label", row), lane, ofSpan(row), Math.max(0, ofSpan(row) - within - measuring));
        if (measuring) add(MEASURING, lane, measuring, measuring);
      }
    });
  return [...sums.values()].sort((one, other) => other.own - one.own);
}

/** Lists the longest sums as a table. */
export function tabulateSums(what: string, sums: readonly Sum[]): HTMLTableElement {
  const rest = sums.length > MOST_SUMS ? `, the ${MOST_SUMS} longest of ${sums.length}` : "";
  const body = sums
    .slice(0, MOST_SUMS)
    .map(({ label, lane, count, total, own }) => [
      label.slice(0, 200),
      lane,
      String(count),
      formatSeconds(total),
      formatSeconds(own),
    ]);
  return textTable(`${what}${rest}`, ["what", "lane", "spans", "time", "self time"], body);
}
