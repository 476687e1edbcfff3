/** How cells of the table of modules look: their shade, and how one number stands for several equal modules. */

import { Scale, textOn } from "../colors";
import { isRatio, verdictColor, verdictSign } from "../difference";
import type { Column } from "../payload";

/** How one number stands for several equal modules: its sign in the table, and a sentence. */
const TOGETHER: Record<string, { sign: string; about: string }> = {
  sum: { sign: "Σ", about: "the sum over all the equal modules" },
  max: { sign: "max", about: "the largest of all the equal modules" },
  all: { sign: "all", about: "taken over the elements of all the equal modules together" },
};

/** How a row of several equal modules has a column; null for texts. */
export function howTogether({ spec, dictionary }: Column): { sign: string; about: string } | null {
  if (dictionary !== null) return null;
  return TOGETHER[spec.together ? "all" : spec.aggregate] ?? null;
}

/** Colours a cell by its number, its ratio or its verdict on two runs, to which it adds a sign. */
export function shade(
  cell: HTMLElement,
  column: Column,
  value: number,
  text: string,
  scaleOf: () => Scale,
): void {
  const verdict = column.spec.kind === "difference" ? text : "";
  if (verdict && verdict !== "equal") paintCell(cell, verdictColor(verdict));
  if (verdictSign(verdict)) cell.prepend(`${verdictSign(verdict)} `);
  if (isRatio(column.spec.name) && text) paintCell(cell, scaleOf().color(value));
  else if (column.dictionary === null && !Number.isNaN(value)) {
    const scale = scaleOf();
    const share = Number.isFinite(value)
      ? Math.round(
          (scale.kind === "diverging" ? Math.abs(scale.place(value) - 0.5) * 2 : scale.place(value)) * 45,
        )
      : 60;
    const color = column.spec.name === "nonfinite" && value > 0 ? "var(--bad)" : "var(--heat)";
    if (value !== 0 && scale.high !== scale.low)
      cell.style.backgroundColor = `color-mix(in srgb, ${color} ${share}%, transparent)`;
  }
}

function paintCell(cell: HTMLElement, color: string): void {
  cell.style.backgroundColor = color;
  cell.style.color = textOn(color);
}

const TEXT_WIDTH = 108;
const VERDICT_WIDTH = 128;
const NUMBER_WIDTH = 86;

/** The width of a column in pixels. */
export function widthOf({ spec, dictionary }: Column): number {
  if (spec.kind === "difference") return VERDICT_WIDTH;
  return dictionary ? TEXT_WIDTH : NUMBER_WIDTH;
}
