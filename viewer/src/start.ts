/** What the page opens on, and what opens around a selection. */

import { verdictSign } from "./difference";
import type { Model } from "./model";
import type { State } from "./state";
import { firstOf } from "./views/compared";

/** The most changes that are open at first. */
const MOST_CHANGED = 8;

/** What the page opens on: the findings if there are any, else the modules, with the outermost ones open. */
export function makeStart(model: Model): State {
  const { findings, shownStep, tables } = model.payload;
  const open = new Set<number>();
  let inside: readonly number[] = model.modules.children(-1);
  for (let level = 0; level < 3 && open.size + inside.length < 40; level++) {
    inside.forEach((row) => open.add(row));
    inside = inside.flatMap((row) => [...model.modulesInside(row, false)]);
  }
  const overlay = ["time", "time.forward", "RMS", "parameters"].find(
    (name) => tables.modules.column(name)?.spec.overlay,
  );
  const statistics = model.statistics();
  const { compared } = model.payload;
  const first = firstOf(model);
  for (const row of first ? model.modules.ancestors(first.module) : []) open.add(row);
  const isOfBoth = tables.modules.column("difference") !== undefined;
  return {
    view:
      compared && isOfBoth
        ? tables.nodes.rows
          ? "graph"
          : "modules"
        : findings.length || !tables.modules.rows
          ? "findings"
          : "modules",
    module: first?.module ?? -1,
    node: first?.node ?? -1,
    site: -1,
    step: shownStep >= 0 ? shownStep : Math.max(0, tables.steps.rows - 1),
    median: model.payload.medians !== "",
    overlay: isOfBoth
      ? "difference"
      : (overlay ?? model.payload.tables.modules.columns.find(({ spec }) => spec.overlay)?.spec.name ?? ""),
    query: "",
    open,
    each: new Set(),
    graphOpen: openAtStart(model),
    unfolded: new Set(),
    columns: null,
    sort: "",
    flat: false,
    backward: true,
    role: "",
    statistic: statistics[0]?.spec.name ?? "",
    pins: [],
    theme: "auto",
  };
}

/** The phases, and the roots in them, and what is around that which failed. */
function openAtStart(model: Model): Set<number> {
  const open = new Set<number>();
  for (const phase of model.graph.children(-1)) {
    if (!["forward", "backward", "recompute"].includes(model.phase(phase))) continue;
    open.add(phase);
    const inside = model.graph.children(phase).filter((node) => model.isLayer(node));
    if (inside.length === 1) open.add(inside[0]);
  }
  for (const node of [...model.failures.nodes.slice(-1), ...listChangedNodes(model)])
    for (const outer of model.graph.ancestors(node)) open.add(outer);
  return open;
}

/** The first calls that are changed, or are in one of two runs alone. */
function listChangedNodes(model: Model): number[] {
  const rows = Array.from(model.graph.order).filter((row) => {
    const verdict = model.difference("nodes", row);
    const isOutermost = model.difference("nodes", model.graph.parent[row]) !== verdict;
    return model.phase(row) === "forward" && verdictSign(verdict) && isOutermost && model.isLayer(row);
  });
  return rows.slice(0, MOST_CHANGED);
}

/** Opens what is around a selected module in the tree, so that it can be seen. */
export function reveal(model: Model, state: State, selection: Partial<State>): Partial<State> {
  const change: { -readonly [key in keyof State]?: State[key] } = {};
  const { module = -1 } = selection;
  if (module >= 0 && module < model.modules.size) {
    const folded = model.payload.tables.modules.link("folded", module);
    const isEach = model.modules.ancestors(module).some((row) => state.each.has(row));
    const shown = folded >= 0 && !isEach ? folded : module;
    const closed = model.modules.ancestors(shown).filter((row) => !state.open.has(row));
    if (closed.length) change.open = new Set([...state.open, ...closed]);
  }
  return change;
}
