/** What a badge says: of an error where it was raised, and of values that are not finite which they are, in which phase,
 * and whether they came up here. */

import type { Model } from "./model";

export interface Badge {
  /** `NaN↓`, `inf↑`, `NaN inf↓↑`, `failed`: down in forward, up in backward; a star before it where they came up. */
  text: string;
  title: string;
  /** Whether they came up here or inside, and were not merely passed on; of an error, whether it was raised here. */
  isOrigin: boolean;
}

const STAR = "★";
const ARROWS = { forward: "↓", backward: "↑" };
const PHASES = ["forward", "backward"] as const;

/** The badge of a module; null if all of its values are finite and nothing failed. */
export function badgeOfModule(model: Model, row: number): Badge | null {
  const { modules } = model.payload.tables;
  const failure = badgeOfFailure(model.modules, row, model.failures.modules);
  if (failure?.isOrigin || !(modules.number("nonfinite", row) > 0)) return failure;
  const has = (what: string, phase: string) => modules.number(`${what}.${phase}`, row) > 0;
  const kinds = ["NaN", "inf"].filter((what) => PHASES.some((phase) => has(what, phase)));
  const phases = PHASES.filter((phase) => kinds.some((what) => has(what, phase)));
  return makeBadge(kinds, phases, cameUp(model.modules, row, model.origins.modules));
}

/** The badge of a node of the graph; null if all of its values are finite and nothing failed. */
export function badgeOfNode(model: Model, node: number): Badge | null {
  const [nonfinite, infinite] = [model.countsOfNodes.nonfinite[node], model.countsOfNodes.infinite[node]];
  const failure = badgeOfFailure(model.graph, node, model.failures.nodes);
  if (failure?.isOrigin || !(nonfinite > 0)) return failure;
  const kinds = [nonfinite !== infinite ? "NaN" : "", infinite > 0 ? "inf" : ""];
  const phase = PHASES.filter((each) => each === model.phase(node));
  return makeBadge(kinds.filter(Boolean), phase, cameUp(model.graph, node, model.origins.nodes));
}

/** The badge of what raised an error, or of what that was in; null for all else. */
function badgeOfFailure(tree: Model["graph"], row: number, failures: readonly number[]): Badge | null {
  const where = cameUp(tree, row, failures);
  const isOrigin = where === "here";
  return where === "before"
    ? null
    : { text: "failed", title: `An error was raised ${isOrigin ? "here" : "inside"}.`, isOrigin };
}

type Where = "here" | "inside" | "before";

/** Whether a row is an origin, or the innermost origins are inside it. */
function cameUp(tree: Model["graph"], row: number, origins: readonly number[]): Where {
  if (origins.includes(row)) return "here";
  const isInside = (each: number) =>
    tree.position[each] > tree.position[row] && tree.position[each] < tree.end[row];
  return origins.some(isInside) ? "inside" : "before";
}

function makeBadge(kinds: readonly string[], phases: readonly (keyof typeof ARROWS)[], where: Where): Badge {
  const what = kinds.join(" ") || "NaN";
  const when = phases.length ? ` in ${phases.join(" and ")}` : "";
  const told = {
    here: "They came up here.",
    inside: "They came up inside.",
    before: "They came from elsewhere: what has a star made them.",
  };
  return {
    text: `${where === "here" ? STAR : ""}${what}${phases.map((phase) => ARROWS[phase]).join("")}`,
    title: `${kinds.join(" and ") || "NaN or inf"}${when}. ${told[where]}`,
    isOrigin: where !== "before",
  };
}
