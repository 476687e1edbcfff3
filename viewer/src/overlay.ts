/** What colours show: any column of modules or nodes, or a statistic of what was measured at a step. */

import { kindColor, Scale } from "./colors";
import {
  divide,
  dropNoise,
  isRatio,
  nameOfRatio,
  noiseOfRatio,
  specOfRatio,
  verdictColor,
} from "./difference";
import { formatValue } from "./format";
import type { Model, Moment } from "./model";
import { Column, type Table } from "./payload";
import { combine } from "./tree";

export interface OverlayChoice {
  key: string;
  label: string;
  about: string;
  /** The heading of the choice. */
  group: string;
}

/** The values of all modules and all nodes of the graph. */
export interface Values {
  readonly modules: Float64Array;
  readonly nodes: Float64Array;
  /** The values of nodes while each stands for its equal siblings too. */
  readonly folded: Float64Array;
}

const PARTS = ["modules", "nodes", "folded"] as const;

/** One overlay: its values, and those that are drawn as colours, which have 1 for what is noise. */
export class Overlay implements Values {
  readonly scale: Scale;
  readonly modules: Float64Array;
  readonly nodes: Float64Array;
  readonly folded: Float64Array;
  readonly drawn: Values;

  constructor(
    readonly choice: OverlayChoice,
    values: Values,
    private readonly column: Column,
    private readonly noise?: Values,
  ) {
    [this.modules, this.nodes, this.folded] = PARTS.map((part) => values[part]);
    this.scale = new Scale(
      this.isKinds ? [] : [this.modules, this.nodes, this.folded],
      undefined,
      isRatio(choice.key),
    );
    const draw = (part: keyof Values) =>
      noise ? values[part].map((value, row) => dropNoise(value, noise[part][row])) : values[part];
    this.drawn = { modules: draw("modules"), nodes: draw("nodes"), folded: draw("folded") };
  }

  /** How much of it may be noise: nothing, a part that is known of each row, or all, as no more is known. */
  get isNoise(): "no" | "partly" | "all" {
    if (!this.noise) return "no";
    return PARTS.some((part) => this.noise![part].some(Number.isFinite)) ? "partly" : "all";
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
    const { spec } = (ofModules ?? ofNodes)!;
    const phases = this.columnsByPhase(spec.measure, moment);
    const own = ofNodes ? this.ofNodes(ofNodes) : this.lendToNodes(values, phases);
    if (ofNodes && (moment >= 0 || (isMedian && spec.kind === "seconds")))
      this.putLent(own, values, spec.aggregate, phases, moment >= 0);
    return this.make(choice, values, own, (ofNodes ?? ofModules)!);
  }

  /**
   * Gives the layers that are the only call of their module in their phase the numbers of other steps than the shown
   * one. Of what is not known in these steps, as of ops, nothing is left; but medians stand beside the shown step.
   */
  private putLent(
    own: Float64Array,
    values: Float64Array,
    aggregate: string,
    phases: ReadonlyMap<string, Column>,
    isAlone: boolean,
  ): void {
    const { graph } = this.model;
    for (let node = 0; node < own.length; node++) {
      const module = this.model.moduleOfNode(node);
      const phase = this.model.phase(node);
      const ofAll = phases.size || phase !== "forward" ? NaN : values[module];
      const value = this.isOnlyCall(node) ? (phases.get(phase)?.number(module) ?? ofAll) : NaN;
      const isSum = graph.table.text("kind", node) === "phase";
      if (isSum || isAlone || !Number.isNaN(value)) own[node] = value;
    }
    graph.fillGroups(own, aggregate);
  }

  /** Whether a node is the only call of its module in its phase. */
  private isOnlyCall(node: number): boolean {
    const module = this.model.moduleOfNode(node);
    const phase = this.model.phase(node);
    const isCall = (each: number) => this.model.isLayer(each) && this.model.phase(each) === phase;
    return module >= 0 && isCall(node) && this.model.nodesOf.get(module).filter(isCall).length === 1;
  }

  private make(choice: OverlayChoice, modules: Float64Array, nodes: Float64Array, column: Column): Overlay {
    const { graph, foldedInto } = this.model;
    const aggregate = column.dictionary === null ? column.spec.aggregate : "none";
    const folded = nodes.slice();
    for (let node = 0; node < graph.size; node++) {
      const others = foldedInto.get(node);
      if (others.length) folded[node] = combine(nodes, [node, ...others], aggregate);
    }
    return new Overlay(choice, { modules, nodes, folded }, column);
  }

  /** What the second run has over what the first has; of what stands for several, over the sums. */
  private ofRatio(choice: OverlayChoice, chosen: Moment): Overlay {
    const name = nameOfRatio(choice.key);
    const { modules, nodes, second_modules: others } = this.model.payload.tables;
    const { model } = this;
    const first = this.ofRun(choice, modules, modules.column(name), nodes.column(name));
    const second = this.ofRun(choice, others, model.second("modules", name), model.second("nodes", name));
    const spec = specOfRatio((nodes.column(name) ?? modules.column(name))!.spec)!;
    const isOfBoth = model.momentOf(chosen) < 0 || !model.isKept(name);
    const over = (part: keyof Values) =>
      first[part].map((value, row) => (isOfBoth ? divide(value, second[part][row]) : NaN));
    const values = { modules: over("modules"), nodes: over("nodes"), folded: over("folded") };
    const column = new Column(spec, () => new Float64Array());
    return new Overlay(choice, values, column, this.noiseOf(choice.key));
  }

  /** How far ratios of times may be from 1 by noise: infinitely for what one step is known of, as ops. */
  private noiseOf(key: string): Values | undefined {
    const { model } = this;
    const noise = noiseOfRatio(model, key);
    if (!noise) return undefined;
    const ofNode = (node: number, module: number) =>
      this.isOnlyCall(node) ? noise(module, model.phase(node)) : Infinity;
    const sums = (node: number) => model.payload.tables.modules.link("folded", model.moduleOfNode(node));
    const nodes = Float64Array.from({ length: model.graph.size }, (_, node) =>
      ofNode(node, model.moduleOfNode(node)),
    );
    return {
      modules: Float64Array.from({ length: model.modules.size }, (_, row) => noise(row)),
      nodes,
      folded: nodes.map((own, node) => (model.foldedInto.get(node).length ? ofNode(node, sums(node)) : own)),
    };
  }

  /** The values of one run in the shown step; the times of modules are medians where the page has these. */
  private ofRun(choice: OverlayChoice, table: Table, ofModules?: Column, ofNodes?: Column): Overlay {
    const values = ofModules
      ? this.model.modules.values(ofModules)
      : new Float64Array(this.model.modules.size).fill(NaN);
    const column = (ofNodes ?? ofModules)!;
    const { kind, measure, aggregate } = column.spec;
    const phases = columnsByPhase(table, measure);
    const own = ofNodes ? this.ofNodes(ofNodes) : this.lendToNodes(values, phases);
    if (ofNodes && kind === "seconds" && this.model.payload.medians)
      this.putLent(own, values, aggregate, phases, false);
    return this.make(choice, values, own, column);
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
    return this.make(choice, values, this.lendToNodes(values, new Map()), column);
  }

  /** Gives the layers of the graph the values of their modules; a time of one phase to the layers of that phase. */
  private lendToNodes(values: Float64Array, phases: ReadonlyMap<string, Column>): Float64Array {
    const { graph, payload } = this.model;
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
    const columns = [...columnsByPhase(this.model.payload.tables.modules, measure)];
    return new Map(columns.map(([phase, column]) => [phase, this.model.moduleColumn(column, moment)]));
  }
}

function columnsByPhase(table: Table, measure: string): Map<string, Column> {
  const columns = table.columns.filter(({ spec }) => spec.measure === measure && spec.phase);
  return new Map(columns.map((column) => [column.spec.phase, column]));
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
