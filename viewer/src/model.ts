/** The recording as the views ask for it: two trees, and what belongs to each module. */

import { isRatio, nameOfRatio } from "./difference";
import { Column, type Payload, type Table } from "./payload";
import { Tree } from "./tree";

/** Rows of a table by the row of another one that they refer to, sorted out when they are first asked for. */
class RowsBy {
  private rows: Map<number, number[]> | null = null;

  constructor(
    private readonly table: Table,
    private readonly column: string,
  ) {}

  get(key: number): readonly number[] {
    this.rows ??= this.sortOut();
    return this.rows.get(key) ?? [];
  }

  private sortOut(): Map<number, number[]> {
    const rows = new Map<number, number[]>();
    const values = this.table.column(this.column);
    for (let row = 0; values && row < this.table.rows; row++) {
      const key = values.number(row);
      if (Number.isNaN(key)) continue;
      const found = rows.get(key);
      if (found) found.push(row);
      else rows.set(key, [row]);
    }
    return rows;
  }
}

/** What the slider chooses: a row of `steps`, or the medians over several. */
export interface Moment {
  step: number;
  median: boolean;
}

/** The position of a step in a table of steps, or of the last one before it; else of the first. */
function lastUntil(steps: Table, step: number): number {
  let found = steps.rows ? 0 : -1;
  for (let at = 0; at < steps.rows; at++) if (steps.link("step", at) <= step) found = at;
  return found;
}

export class Model {
  readonly modules: Tree;
  readonly graph: Tree;
  readonly nodesOf: RowsBy;
  readonly sitesOf: RowsBy;
  readonly parametersOf: RowsBy;
  readonly into: RowsBy;
  readonly outOf: RowsBy;
  /** The single modules that a folded row sums up. */
  readonly membersOf: RowsBy;
  readonly twinsOf: RowsBy;
  /** The nodes that are not shown while another one stands for them. */
  readonly foldedInto: RowsBy;
  private foundCounts: Model["countsOfNodes"] | null = null;
  private foundOrigins: Model["origins"] | null = null;
  private foundFailures: Model["failures"] | null = null;
  private hasOps: boolean | null = null;
  private foundEvaluation: boolean | null = null;

  constructor(readonly payload: Payload) {
    const { modules, nodes, sites, parameters, edges } = payload.tables;
    this.modules = new Tree(modules, modules.column("order"));
    this.graph = new Tree(nodes, nodes.column("order"));
    this.nodesOf = new RowsBy(nodes, "module");
    this.sitesOf = new RowsBy(sites, "module");
    this.parametersOf = new RowsBy(parameters, "module");
    this.into = new RowsBy(edges, "target");
    this.outOf = new RowsBy(edges, "source");
    this.membersOf = new RowsBy(modules, "folded");
    this.twinsOf = new RowsBy(nodes, "twin");
    this.foldedInto = new RowsBy(nodes, "folded");
  }

  /** Whether edges are the order of calls, as without ops it is not known what reads what. */
  get hasOrder(): boolean {
    return this.payload.tables.edges.text("kind", 0) === "next";
  }

  /** What the edges into a node and out of it are called. */
  get edgeNames(): [string, string] {
    return this.hasOrder ? ["Called after", "Called before"] : ["Reads from", "Read by"];
  }

  /** The modules inside a module that the tree shows: of a run of equal ones their sums, or each of them. */
  modulesInside(row: number, showsEach: boolean): readonly number[] {
    const children = this.modules.children(row);
    if (!this.hasMembers(row)) return children;
    return children.filter((child) => this.isMember(child) === showsEach);
  }

  /** The rows in which values that are not finite came up: modules with the rows that sum them up, and nodes. */
  get origins(): { modules: readonly number[]; nodes: readonly number[] } {
    return (this.foundOrigins ??= { modules: this.listOrigins("modules"), nodes: this.listOrigins("nodes") });
  }

  /** The innermost nodes that raised an error, and the rows of their modules. */
  get failures(): { modules: readonly number[]; nodes: readonly number[] } {
    return (this.foundFailures ??= this.listFailures());
  }

  private listFailures(): { modules: number[]; nodes: number[] } {
    const { graph } = this;
    const raised = graph.table.column("raised");
    const rows = Array.from(graph.order).filter((row) => raised && raised.number(row) > 0);
    const nodes = rows.filter((row, at) => !(graph.position[rows[at + 1]] < graph.end[row]));
    return {
      nodes: this.withSums(nodes, graph.table),
      modules: this.withSums(nodes.map((node) => this.moduleOfNode(node))),
    };
  }

  /** How many elements of each node are not finite, and infinite; of a group the sums of what is inside. */
  get countsOfNodes(): { nonfinite: Float64Array; infinite: Float64Array } {
    return (this.foundCounts ??= {
      nonfinite: this.countNodes("nonfinite"),
      infinite: this.countNodes("infinite"),
    });
  }

  private countNodes(name: string): Float64Array {
    const column = this.graph.table.column(name);
    return column ? this.graph.values(column) : new Float64Array(this.graph.size);
  }

  private listOrigins(name: "modules" | "nodes"): number[] {
    const table = this.payload.tables[name];
    const column = table.column("origin");
    if (!column) return [];
    const found = Array.from(column.values).flatMap((flag, row) => (flag ? [row] : []));
    return this.withSums(found, table);
  }

  /** The rows, and those that sum them up. */
  private withSums(rows: readonly number[], table = this.payload.tables.modules): number[] {
    return rows.flatMap((row) => [row, table.link("folded", row)]).filter((row) => row >= 0);
  }

  /** What a column of modules or of nodes is in the second run; undefined if no two runs are shown. */
  second(name: "modules" | "nodes", column: string): Column | undefined {
    return this.payload.tables[`second_${name}`].column(column);
  }

  /** How a row differs in the second run; empty where that is not known. */
  difference(name: "modules" | "nodes", row: number): string {
    return this.payload.tables[name].text("difference", row);
  }

  /** The name of a row in the second run, if it has another one there. */
  otherName(name: "modules" | "nodes", row: number): string {
    return this.second(name, "label")?.text(row) ?? "";
  }

  isMember(row: number): boolean {
    return this.payload.tables.modules.text("role", row) === "member";
  }

  hasMembers(row: number): boolean {
    return this.payload.tables.modules.text("role", row) === "folded";
  }

  moduleName(row: number): string {
    const { modules } = this.payload.tables;
    return (
      modules.text("label", row) || modules.text("path", row) || modules.text("root", row) || `module ${row}`
    );
  }

  /** The whole path of a module; of a root its name. */
  modulePath(row: number): string {
    if (row < 0) return "";
    const { modules } = this.payload.tables;
    return modules.text("path", row) || modules.text("root", row) || this.moduleName(row);
  }

  nodeName(row: number): string {
    const { nodes } = this.payload.tables;
    return nodes.text("label", row) || nodes.text("name", row) || nodes.text("kind", row) || `node ${row}`;
  }

  /** The name of a node, and that in the second run if it is another one. */
  bothNames(row: number): string {
    const other = this.otherName("nodes", row);
    return other ? `${this.nodeName(row)} = ${other}` : this.nodeName(row);
  }

  /** The name of a node with that of its module before it. */
  nodePath(row: number): string {
    const module = this.moduleOfNode(row);
    const name = this.nodeName(row);
    const path = module < 0 ? "" : this.modulePath(module);
    return !path || this.isLayer(row) ? path || name : `${path} ${name}`;
  }

  isLayer(node: number): boolean {
    return ["module", "container", "phase", "optimizer"].includes(
      this.payload.tables.nodes.text("kind", node),
    );
  }

  /** What stands below the name of a node: the type of a layer, the shape of an op, or that a call has no ops. */
  nodeNote(node: number): string {
    const { nodes } = this.payload.tables;
    this.hasOps ??= Array.from({ length: nodes.rows }, (_, row) => nodes.text("kind", row)).includes("op");
    if (nodes.text("kind", node) === "call" && this.hasOps) return "no ops";
    return nodes.text(this.isLayer(node) ? "type" : "shape", node);
  }

  phase(node: number): string {
    return this.payload.tables.nodes.text("phase", node);
  }

  moduleOfNode(node: number): number {
    return this.payload.tables.nodes.link("module", node);
  }

  /** The node that a module is shown as in the graph: its first layer. */
  nodeOfModule(module: number): number {
    const shown = this.hasMembers(module) ? (this.membersOf.get(module)[0] ?? module) : module;
    const nodes = this.nodesOf.get(shown);
    const layer = nodes.find((node) => this.isLayer(node)) ?? nodes[0];
    if (layer !== undefined) return layer;
    const summed = this.membersOf.get(shown)[0];
    return summed === undefined ? -1 : (this.nodesOf.get(summed)[0] ?? -1);
  }

  /** The rows of modules that stand for the same as a row: itself, or the single modules of a sum. */
  sameModules(module: number): readonly number[] {
    const members = this.membersOf.get(module);
    return members.length ? members : [module];
  }

  stepName(row: number): string {
    const number = this.payload.tables.steps.number("number", row);
    return `step ${Number.isNaN(number) ? row : number}`;
  }

  /** Whether some steps are of evaluation and others are not. */
  get hasEvaluation(): boolean {
    return (this.foundEvaluation ??= this.findEvaluation());
  }

  private findEvaluation(): boolean {
    const { steps } = this.payload.tables;
    const kinds = new Set(Array.from({ length: steps.rows }, (_, row) => steps.text("kind", row)));
    return kinds.has("eval") && kinds.size > 1;
  }

  /** Whether a step is told apart from the others as one of evaluation. */
  isEvaluation(step: number): boolean {
    return this.hasEvaluation && this.payload.tables.steps.text("kind", step) === "eval";
  }

  /** Says of two runs that a view shows the first alone; empty if there is one run. */
  describeRun(what: string): string {
    return this.payload.compared ? `The ${what} here are of A alone.` : "";
  }

  /** The kept step whose numbers modules have: the chosen one, or the last before it; -1 for those of their table. */
  momentOf({ step, median }: Moment): number {
    const { shownStep, medians, tables } = this.payload;
    if (median || (step === shownStep && !medians)) return -1;
    return lastUntil(tables.module_steps, step);
  }

  /** Whether badges, which are of the shown step, are of the chosen one. */
  hasBadges(chosen: Moment): boolean {
    const moment = this.momentOf(chosen);
    return moment < 0 || this.payload.tables.module_steps.link("step", moment) === this.payload.shownStep;
  }

  /** The columns of modules with numbers of other steps than the shown one. */
  isKept(name: string): boolean {
    return this.payload.tables.module_series.column(name) !== undefined;
  }

  /** The numbers of a column of modules at a moment. */
  moduleColumn(column: Column, moment: number): Column {
    const { modules, module_steps: steps, module_series: series } = this.payload.tables;
    const isOfBoth = isRatio(column.spec.name);
    const kept = series.column(isOfBoth ? nameOfRatio(column.spec.name) : column.spec.name);
    if (moment < 0 || !kept) return column;
    if (isOfBoth) return new Column(column.spec, () => new Float64Array(modules.rows).fill(NaN));
    return new Column(column.spec, () =>
      Float64Array.from({ length: modules.rows }, (_, row) => kept.number(row * steps.rows + moment)),
    );
  }

  /** Says of which steps the numbers of modules are, or of the graph; empty if it is not known. */
  describeMoment(chosen: Moment, isGraph = false): string {
    const { shownStep, medians, tables } = this.payload;
    if (shownStep < 0) return "";
    const shown = this.stepName(shownStep);
    const moment = this.momentOf(chosen);
    if (moment < 0 && medians)
      return isGraph
        ? `Times of modules: medians of ${medians}. All else: ${shown}.`
        : `Times, costs, memory: medians of ${medians}. Values: ${shown}.`;
    if (moment < 0) {
      const other = chosen.step === shownStep ? "" : `, not of ${this.stepName(chosen.step)}`;
      return `All numbers here are of ${shown}${other}.`;
    }
    const kept = tables.module_steps.link("step", moment);
    const nearest = kept === chosen.step ? "" : ` (${this.stepName(chosen.step)} is not kept)`;
    const rest = medians && !isGraph ? `medians of ${medians}` : shown;
    return isGraph
      ? `Times and values of modules: ${this.stepName(kept)}${nearest}, of ops none. All else: ${rest}.`
      : `Times and values: ${this.stepName(kept)}${nearest}. Costs, memory: ${rest}.`;
  }

  /** The columns of logged scalars. */
  scalars(): Column[] {
    return this.payload.tables.steps.columns.filter((column) => column.spec.scalar);
  }

  /** What was logged with a step: NaN if that was NaN, undefined if nothing was. */
  logged(scalar: Column, step: number): number | undefined {
    const value = scalar.number(step);
    const flag = this.payload.tables.steps.column(scalar.spec.name.replace(/^scalar/, "logged"));
    return Number.isNaN(value) && !flag?.number(step) ? undefined : value;
  }

  /** The statistics that sites have over the steps. */
  statistics(): Column[] {
    return this.payload.tables.series.columns.filter(
      (column) => !["site", "step"].includes(column.spec.name),
    );
  }

  /** The statistics that sites of a role have. */
  statisticsOf(role: string): Column[] {
    const { sites, series_steps: steps } = this.payload.tables;
    const found = Array.from({ length: sites.rows }, (_, site) => site);
    const ofRole = found.filter((site) => sites.text("role", site) === role);
    const positions = Array.from({ length: steps.rows }, (_, at) => at);
    const isThere = (column: Column) =>
      ofRole.some((site) => positions.some((at) => !Number.isNaN(this.seriesValue(column, site, at))));
    return this.statistics().filter(isThere);
  }

  /** The position of a step in the series, or of the last one before it. */
  seriesPosition(step: number): number {
    return lastUntil(this.payload.tables.series_steps, step);
  }

  seriesValue(column: Column, site: number, position: number): number {
    return position < 0 ? NaN : column.number(site * this.payload.tables.series_steps.rows + position);
  }

  isMeasured(site: number, position: number): boolean {
    const column = this.payload.tables.series.column("nonfinite");
    return column === undefined || !Number.isNaN(this.seriesValue(column, site, position));
  }

  /** What tensors of a role are called. */
  roleName(role: string): string {
    return this.payload.tables.sites.text("role_title", this.siteOfRole(role)) || role.replaceAll("_", " ");
  }

  /** What is to be known of the tensors of a role; mostly nothing. */
  roleAbout(role: string): string {
    return this.payload.tables.sites.text("role_about", this.siteOfRole(role));
  }

  /** The first site of a role; -1 for none. */
  private siteOfRole(role: string): number {
    const column = this.payload.tables.sites.column("role");
    const code = column?.dictionary?.indexOf(role) ?? -1;
    return column ? column.values.indexOf(code as never) : -1;
  }

  siteName(site: number): string {
    const { sites } = this.payload.tables;
    const label = sites.text("label", site);
    if (label) return label;
    return `${this.modulePath(sites.link("module", site))} ${sites.text("role", site)}${sites.text("slot", site)}`;
  }
}
