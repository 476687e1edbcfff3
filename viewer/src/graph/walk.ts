/** Finds the node that an arrow key leads to. */

import type { Tree } from "../tree";
import type { GraphLayout } from "./layout";

/** Down follows a line to its reader, up to what is read; left goes to the group around, right inside or across to the
 * backward. Returns -1 for none. */
export function nodeBeside(layout: GraphLayout, graph: Tree, node: number, key: string): number {
  if (node < 0) return graph.children(-1)[0] ?? -1;
  switch (key) {
    case "ArrowLeft":
      return graph.parent[node];
    case "ArrowRight": {
      const inside = layout.isOpen(node) ? layout.levels.level(node).items[0] : undefined;
      return inside ?? layout.levels.twinsOf(node).find((twin) => twin !== node) ?? -1;
    }
    default:
      return alongLine(layout, graph, node, key === "ArrowDown");
  }
}

function alongLine(layout: GraphLayout, graph: Tree, node: number, isForward: boolean): number {
  const level = layout.levels.level(graph.parent[node]);
  const at = level.items.indexOf(node);
  const [ours, theirs] = isForward ? [level.from, level.to] : [level.to, level.from];
  for (let line = 0; line < ours.length; line++)
    if (ours[line] === at && theirs[line] >= 0) return level.items[theirs[line]];
  return level.items[at + (isForward ? 1 : -1)] ?? -1;
}
