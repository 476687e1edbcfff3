/** Draws lines from the selection to what belongs to it in another phase. */

import type { Painter } from "../painter";
import type { GraphPainter, Scene } from "./paint";

/** Leads to what the selection reads and what reads it in another phase, and to its forward or backward. `visible` gives
 * the node that shows another one. */
export function paintRelations(
  painter: Painter,
  { model, selected, related, theme }: Scene,
  drawn: GraphPainter["drawn"],
  visible: (node: number) => number,
): void {
  const from = drawn.get(selected);
  if (!from) return;
  const { edges } = model.payload.tables;
  const ends = [
    ...model.into.get(selected).map((edge) => edges.link("source", edge)),
    ...model.outOf.get(selected).map((edge) => edges.link("target", edge)),
  ].filter((node) => model.phase(node) !== model.phase(selected));
  for (const node of [...ends, ...related]) {
    const to = drawn.get(visible(node));
    if (!to || to === from) continue;
    const isRight = to.x > from.x + from.width;
    const start = isRight ? from.x + from.width : from.x;
    const end = isRight ? to.x : to.x + to.width;
    const points = [start, from.y + from.height / 2, end, to.y + to.height / 2];
    painter.line(points, { color: theme.accent, width: 1.4, dash: [5, 4] });
  }
}
