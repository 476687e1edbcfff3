/** What colours show: any column of modules or nodes, or a statistic of what was measured at a step. */

import { kindColor, Scale } from "./colors";
import { divide, isRatio, nameOfRatio, noiseOfRatio, specOfRatio, verdictColor } from "./difference";
import { formatValue } from "./format";
import type { Model, Moment } from "./model";
import { Column, type ColumnSpec } from "./payload";
import { combine } from "./tree";

export interface OverlayChoice {
  key: string;
  label: string;
  about: string;
  /** The heading of the choice. */
  group: string;
}

/** The values of one overlay for all modules and all nodes of the graph. */
export class Overlay {
  readonly scale: Scale;

  constructor(
    readonly choice: OverlayChoice,
    readonly modules: Float64Array,
    readonly nodes: Float64Array,
    /** The values of nodes while each stands for its equal siblings too. */
    readonly folded: Float64Array,
    private readonly column: Column,
    noise = 0,
  ) {
    this.scale = new Scale(
      this.isKinds ? [] : [modules, nodes, folded],
      undefined,
      isRatio(choice.key),
      noise,
    );
  }

  get isKinds(): boolean {
    return this.column.dictionary !== null;
  }

  /** Whether it says how two runs differ. */
  get isVerdict(): boolean {
    return this.column.spec.kind === "difference";
  }

  get kinds(): readonly string[] {
    return this.column.dictionary ?? [];
  }

  color(value: number): string {
    if (this.isVerdict) return verdictColor(this.kinds[value]);
    return this.isKinds ? kindColor(value) : this.scale.color(value);
  }

  text(value: number): string {
    return formatValue(this.column, value);
  }
}

/** Gives a column of texts the numbers that another one has for them, and numbers of its own for further texts. */
function sayAlike(column: Column, other: Column): Column {
  if (column.dictionary === null || other.dictionary === null) return column;
  const texts = [...other.dictionary];
  const codes = column.dictionary.map((text) => {
    const code = texts.indexOf(text);
    return code >= 0 ? code : texts.push(text) - 1;
  });
  const values = Float64Array.from(column.values, (_, row) => codes[column.number(row)] ?? NaN);
  return new Column(column.spec, () => values, texts);
}

/** Makes overlays of a recording, each once. */
export class OverlayMaker {
  readonly choices: readonly OverlayChoice[];
  private readonly made = new Map<string, Overlay>();

  constructor(private readonly model: Model) {
    const columns = listColumns(model);
    const [first, rest] = [true, false].map((isFirst) => columns.filter(({ group }) => !group === isFirst));
    this.choices = [...first, ...listRatios(model), ...rest, ...listStatistics(model)];
  }

  /** Returns an overlay at a moment, or null for a key that is not there. */
  get(key: string, chosen: Moment): Overlay | null {
    const choice = this.choices.find((each) => each.key === key);
    if (!choice) return null;
    const isMeasured = key.startsWith("@");
    const moment = this.model.isKept(isRatio(key) ? nameOfRatio(key) : key)
      ? this.model.momentOf(chosen)
      : -1;
    const name = `${key}@${isMeasured ? this.model.seriesPosition(chosen.step) : moment}${chosen.median}`;
    let overlay = this.made.get(name);
    if (!overlay) {
      overlay = isRatio(key)
        ? this.ofRatio(choice, chosen)
        : isMeasured
          ? this.ofStatistic(choice, chosen.step)
          : this.ofColumn(choice, moment, chosen.median);
      if (this.made.size > 40) this.made.clear();
      this.made.set(name, overlay);
    }
    return overlay;
  }

  private ofColumn(choice: OverlayChoice, moment: number, isMedian: boolean): Overlay {
    const { modules, nodes } = this.model.payload.tables;
    const ofModules = modules.column(choice.key);
    const found = nodes.column(choice.key);
    const ofNodes = found && ofModules ? sayAlike(found, ofModules) : found;
    const values = ofModules
      ? this.model.modules.values(this.model.moduleColumn(ofModules, moment))
      : new Float64Array(modules.rows).fill(NaN);
    const own = ofNodes ? this.ofNodes(ofNodes) : this.lendToNodes(values, ofModules?.spec.measure, moment);
    const isOfOtherSteps = moment >= 0 || (isMedian && ofModules?.spec.kind === "seconds");
    if (ofNodes && isOfOtherSteps) this.putLent(own, values, ofModules!.spec, moment);
    return this.make(choice, values, own, (ofNodes ?? ofModules)!);
  }

  /**
   * Gives the layers that are the only call of their module in their phase the numbers of other steps than the shown
   * one. Of what is not known in these steps, as of ops, nothing is left; but medians stand beside the shown step.
   */
  private putLent(
    own: Float64Array,
    values: Float64Array,
    { measure, aggregate }: ColumnSpec,
    moment: number,
  ): void {
    const { graph, nodesOf } = this.model;
    const phases = this.columnsByPhase(measure, moment);
    for (let node = 0; node < own.length; node++) {
      const module = this.model.moduleOfNode(node);
      const phase = this.model.phase(node);
      const isCall = (each: number) => this.model.isLayer(each) && this.model.phase(each) === phase;
      const isOnly = module >= 0 && isCall(node) && nodesOf.get(module).filter(isCall).length === 1;
      const ofAll = phases.size || phase !== "forward" ? NaN : values[module];
      const value = isOnly ? (phases.get(phase)?.number(module) ?? ofAll) : NaN;
      const isSum = graph.table.text("kind", node) === "phase";
      if (isSum || moment >= 0 || !Number.isNaN(value)) own[node] = value;
    }
    graph.fillGroups(own, aggregate);
  }

  private make(choice: OverlayChoice, modules: Float64Array, nodes: Float64Array, column: Column): Overlay {
    const { graph, foldedInto } = this.model;
    const aggregate = column.dictionary === null ? column.spec.aggregate : "none";
    const folded = nodes.slice();
    for (let node = 0; node < graph.size; node++) {
      const others = foldedInto.get(node);
      if (others.length) folded[node] = combine(nodes, [node, ...others], aggregate);
    }
    return new Overlay(choice, modules, nodes, folded, column);
  }

  /** What the second run has over what the first has; of what stands for several, over the sums. */
  private ofRatio(choice: OverlayChoice, chosen: Moment): Overlay {
    const name = nameOfRatio(choice.key);
    const { modules, nodes } = this.model.payload.tables;
    const first = this.ofRun(choice, modules.column(name), nodes.column(name));
    const second = this.ofRun(choice, this.model.second("modules", name), this.model.second("nodes", name));
    const spec = specOfRatio((nodes.column(name) ?? modules.column(name))!.spec)!;
    const isOfBoth = this.model.momentOf(chosen) < 0 || !this.model.isKept(name);
    const over = (which: "modules" | "nodes" | "folded") =>
      first[which].map((value, row) => (isOfBoth ? divide(value, second[which][row]) : NaN));
    const column = new Column(spec, () => new Float64Array());
    const noise = noiseOfRatio(this.model, choice.key);
    return new Overlay(choice, over("modules"), over("nodes"), over("folded"), column, noise);
  }

  /** The values of one run in the shown step. */
  private ofRun(choice: OverlayChoice, ofModules?: Column, ofNodes?: Column): Overlay {
    const values = ofModules
      ? this.model.modules.values(ofModules)
      : new Float64Array(this.model.modules.size).fill(NaN);
    const own = ofNodes ? this.ofNodes(ofNodes) : this.lendToNodes(values, undefined, -1);
    return this.make(choice, values, own, (ofNodes ?? ofModules)!);
  }

  /** The values of nodes. What does nothing, such as an input, has no time and no cost. */
  private ofNodes(column: Column): Float64Array {
    const { graph } = this.model;
    const values = graph.values(column);
    for (let node = 0; node < graph.size; node++)
      if (
        values[node] === 0 &&
        column.dictionary === null &&
        !["op", "call"].includes(graph.table.text("kind", node)) &&
        !this.model.isLayer(node)
      )
        values[node] = NaN;
    return values;
  }

  /** The largest value of a statistic among the sites of each module, with one role, at a step. */
  private ofStatistic(choice: OverlayChoice, step: number): Overlay {
    const [, role, name] = choice.key.split("@");
    const { modules, sites, series } = this.model.payload.tables;
    const column = series.column(name)!;
    const position = this.model.seriesPosition(step);
    const values = new Float64Array(modules.rows).fill(NaN);
    for (let site = 0; site < sites.rows; site++) {
      const module = sites.link("module", site);
      if (module < 0 || sites.text("role", site) !== role) continue;
      const value = this.model.seriesValue(column, site, position);
      if (!(Math.abs(value) <= Math.abs(values[module]))) values[module] = value;
    }
    for (let row = 0; row < modules.rows; row++) {
      const members = this.model.membersOf.get(row);
      if (members.length && Number.isNaN(values[row])) values[row] = combine(values, members, "max");
    }
    return this.make(choice, values, this.lendToNodes(values, undefined, -1), column);
  }

  /** Gives the layers of the graph the values of their modules; a time of one phase to the layers of that phase. */
  private lendToNodes(values: Float64Array, measure: string | undefined, moment: number): Float64Array {
    const { graph, payload } = this.model;
    const phases = measure ? this.columnsByPhase(measure, moment) : new Map<string, Column>();
    const lent = new Float64Array(graph.size).fill(NaN);
    for (let node = 0; node < graph.size; node++) {
      const module = this.model.moduleOfNode(node);
      if (module < 0 || payload.tables.nodes.text("kind", node) !== "module") continue;
      const ofPhase = phases.get(this.model.phase(node));
      lent[node] = ofPhase ? ofPhase.number(module) : values[module];
    }
    return lent;
  }

  private columnsByPhase(measure: string, moment: number): Map<string, Column> {
    const columns = this.model.payload.tables.modules.columns.filter((each) => each.spec.measure === measure);
    const ofPhases = columns.filter((each) => each.spec.phase);
    return new Map(ofPhases.map((each) => [each.spec.phase, this.model.moduleColumn(each, moment)]));
  }
}

function listColumns(model: Model): OverlayChoice[] {
  const found = new Map<string, OverlayChoice>();
  for (const table of [model.payload.tables.modules, model.payload.tables.nodes])
    for (const { spec } of table.columns)
      if (spec.overlay && !found.has(spec.name))
        found.set(spec.name, {
          key: spec.name,
          label: spec.label,
          about: spec.about,
          group: groupOf(model, spec.name),
        });
  return [...found.values()];
}

/** The ratios of two runs: of what nodes have, and of what modules have over all phases. */
function listRatios(model: Model): OverlayChoice[] {
  const { modules, nodes } = model.payload.tables;
  const found = new Map<string, OverlayChoice>();
  for (const [name, table] of [["nodes", nodes], ["modules", modules]] as const)
    for (const column of table.columns) {
      const spec = specOfRatio(column.spec);
      const { measure, phase } = column.spec;
      const isByPhase = modules.columns.some((each) => each.spec.phase && each.spec.measure === measure);
      const isThere = spec && model.second(name, column.spec.name) && !phase;
      if (isThere && (name === "nodes" || !isByPhase) && !found.has(spec.name))
        found.set(spec.name, { key: spec.name, label: spec.label, about: spec.about, group: "B over A" });
    }
  return [...found.values()];
} // prettier-ignore

/** Costs are numbers of each call; what else there is was measured on its tensors. */
function groupOf(model: Model, name: string): string {
  if (name === "difference") return "";
  const { modules, nodes } = model.payload.tables;
  const kind = (modules.column(name) ?? nodes.column(name))?.spec.kind ?? "";
  return ["seconds", "bytes", "flops", "count"].includes(kind) && name !== "nonfinite" ? "Costs" : "Values";
}

function listStatistics(model: Model): OverlayChoice[] {
  const { sites } = model.payload.tables;
  const roles = new Set<string>();
  for (let site = 0; site < sites.rows; site++) {
    if (sites.link("module", site) >= 0) roles.add(sites.text("role", site)); // a loss colours no module
  }
  return [...roles].filter(Boolean).flatMap((role) =>
    model.statisticsOf(role).map(({ spec }) => ({
      key: `@${role}@${spec.name}`,
      label: `${spec.label}: ${model.roleName(role)}`,
      group: `At the chosen step: ${model.roleName(role)}`,
      about: `The largest of each module at the step that is chosen. ${spec.about}`.trim(),
    })),
  );
}
