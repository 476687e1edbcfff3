/** The histogram of magnitudes of one tensor at one step: how many elements lie in each power of two. */

import { findRange } from "../colors";
import { h } from "../dom";
import { formatCount } from "../format";
import type { Model } from "../model";

export interface Histogram {
  counts: Float64Array;
  /** Bin i counts magnitudes from 2 ** (exponent + i) up to twice that. */
  exponent: number;
  /** NaN where it is not known. */
  zeros: number;
}

export function histogramAt(model: Model, site: number, step: number): Histogram | null {
  const { histograms, bins } = model.payload.tables;
  const sites = histograms.column("site");
  const counts = bins.column("count");
  if (!sites || !counts) return null;
  let found = -1;
  for (let row = 0; row < histograms.rows; row++)
    if (sites.number(row) === site && histograms.link("step", row) <= step) found = row;
  if (found < 0) return null;
  const first = histograms.link("first", found);
  const length = Math.max(0, histograms.link("length", found));
  return {
    counts: Float64Array.from({ length }, (_, at) => counts.number(first + at) || 0),
    exponent: histograms.link("exponent", found),
    zeros: histograms.number("zeros", found),
  };
}

/** Draws a histogram as bars, with what it shows as text for those who do not see it. */
export function drawHistogram({ counts, exponent, zeros }: Histogram): HTMLElement {
  const most = findRange(counts).high || 1;
  const bars = h("div", { class: "bars", role: "img", "aria-label": describe(counts, exponent, zeros) });
  counts.forEach((count, at) => {
    const bar = h("i", {
      title: `2^${exponent + at} to 2^${exponent + at + 1}: ${formatCount(count)} elements`,
    });
    bar.style.height = `${(count / most) * 100}%`;
    bars.append(bar);
  });
  const ends = h(
    "div",
    { class: "ends" },
    h("span", { text: `2^${exponent}` }),
    h("span", { text: zeros ? `${formatCount(zeros)} zeros` : "magnitude" }),
    h("span", { text: `2^${exponent + counts.length}` }),
  );
  return h("div", { class: "histogram" }, bars, ends);
}

function describe(counts: Float64Array, exponent: number, zeros: number): string {
  const parts = Array.from(counts, (count, at) =>
    count ? `${formatCount(count)} from 2^${exponent + at}` : "",
  );
  if (!Number.isNaN(zeros)) parts.push(`${formatCount(zeros)} zeros`);
  return `Elements by magnitude: ${parts.filter(Boolean).join(", ")}.`;
}
