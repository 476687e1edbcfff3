/** The pane of the selection: what it is, what was measured there, where it comes from and where it goes. */

import type { Context } from "../context";
import { button, h, replaceChildren } from "../dom";
import { inFirst, inSecond, keyOfRatio, noiseOfRatio, type Noise, verdictColor } from "../difference";
import { formatNumber, formatValue, shorten } from "../format";
import type { Column, ColumnSpec } from "../payload";
import { drawHistogram, histogramAt } from "./histogram";

/** Columns that say where a row stands, and are no facts of their own. */
const HIDDEN = new Set([
  "difference",
  "parent",
  "role",
  "folded",
  "label",
  "path",
  "order",
  "twin",
  "module",
  "name",
  "count",
  "start",
  "infinite",
]);
const MOST_LINKS = 12;
/** The role of the gradients of all parameters inside a block. */
const INSIDE = "parameter_grad_inside";

export class DetailPane {
  readonly element = h("aside", {
    class: "detail",
    "aria-label": "Details of the selection",
    tabindex: "-1",
  });

  constructor(private readonly context: Context) {}

  update(): void {
    const { module, node } = this.context.store.state;
    this.element.classList.toggle("nothing", module < 0 && node < 0);
    if (module < 0 && node < 0) {
      replaceChildren(
        this.element,
        h("p", { class: "hint", text: "Select a module, an op or a span to see what is known of it." }),
      );
      return;
    }
    replaceChildren(
      this.element,
      this.makeTitle(),
      ...(node >= 0 ? this.describeNode(node) : []),
      ...(module >= 0 ? this.describeModule(module) : []),
    );
  }

  private makeTitle(): HTMLElement {
    const { model, store } = this.context;
    const { module, node } = store.state;
    const { modules, nodes } = model.payload.tables;
    const isOp = node >= 0 && !model.isLayer(node);
    const name = isOp ? model.nodeName(node) : module >= 0 ? model.modulePath(module) : model.nodeName(node);
    const type = isOp ? nodes.text("kind", node) : modules.text("type", module);
    return h(
      "header",
      {},
      h("h2", { text: shorten(name, 300), title: shorten(name, 2000), dir: "auto" }),
      h("p", { class: "dim", text: [type, node >= 0 ? model.phase(node) : ""].filter(Boolean).join(" · ") }),
      this.describeDifference(isOp || module < 0 ? "nodes" : "modules", isOp || module < 0 ? node : module),
      this.makeActions(),
    );
  }

  /** Says how the selection differs in the second run, and how it is called there. */
  private describeDifference(table: "modules" | "nodes", row: number): HTMLElement | null {
    const { model } = this.context;
    if (!model.payload.compared) return null;
    const verdict = model.difference(table, row) || "not compared";
    const other = model.second(table, "path")?.text(row) || model.otherName(table, row);
    const box = h("i", { class: "box" });
    box.style.backgroundColor = verdictColor(verdict);
    const isNamed = other && verdict !== "only in B";
    return h("p", { class: "verdict" }, box, `${verdict}${isNamed ? `, in B ${shorten(other, 200)}` : ""}`);
  }

  private makeActions(): HTMLElement {
    const { select } = this.context;
    const go = (view: "modules" | "graph" | "timeline" | "values", label: string) =>
      button(label, `Show the selection in the view ${label}`, () => {
        select({ view });
      });
    return h(
      "div",
      { class: "actions" },
      go("modules", "Modules"),
      go("graph", "Graph"),
      go("timeline", "Timeline"),
      go("values", "Values"),
      this.makeGradientLink(),
      this.makeClose(),
      button("Copy as Python", "Copy an expression that finds this in the recording", () => {
        this.copy();
      }),
    );
  }

  /** Closes the pane where it takes room from the view. */
  private makeClose(): HTMLElement {
    const close = button("Close", "Select nothing (Escape)", () => {
      this.context.select({ module: -1, node: -1, site: -1 });
    });
    close.classList.add("close");
    return close;
  }

  /** Leads to the gradients of the module over the steps. */
  private makeGradientLink(): HTMLElement | null {
    const { model, store, select } = this.context;
    const sites = model.sameModules(store.state.module).flatMap((row) => [...model.sitesOf.get(row)]);
    const ofRole = (role: string) =>
      sites.filter((site) => model.payload.tables.sites.text("role", site) === role);
    const found = ["parameter_grad", INSIDE, "grad_output"].map(ofRole).find((each) => each.length);
    if (!found) return null;
    return button("Gradients", "Show its gradients over the steps", () => {
      select({ site: found[0], view: "values" });
      store.update({ role: "", statistic: "l2", pins: found.slice(0, 6) });
    });
  }

  private copy(): void {
    const text = writeSelector(this.context);
    const box = h("textarea", {
      class: "copied",
      readonly: true,
      rows: "3",
      "aria-label": "Python expression",
    });
    box.value = text;
    this.element.querySelector(".copied")?.remove();
    this.element.querySelector(".actions")?.after(box);
    box.select();
    // A frame without an origin has no clipboard; the old way works there.
    const isCopied = document.execCommand("copy") ? Promise.resolve() : navigator.clipboard?.writeText(text);
    (isCopied ?? Promise.reject(new Error())).then(
      () => { this.context.say("Copied."); },
      () => { this.context.say("The browser does not let this page copy. The text is selected."); },
    ); // prettier-ignore
  }

  private describeNode(node: number): HTMLElement[] {
    const { model } = this.context;
    const { nodes } = model.payload.tables;
    const second = (name: string) => model.second("nodes", name);
    const noise = ({ kind }: ColumnSpec) => (kind === "seconds" ? () => Infinity : null);
    const parts = [section("In this call", facts(nodes.columns, node, second, noise))];
    const twin = nodes.link("twin", node);
    const twins = [...(twin >= 0 ? [twin] : []), ...model.twinsOf.get(node)];
    const [from, to] = [model.into.get(node), model.outOf.get(node)];
    const [source, target] = model.edgeNames;
    if (from.length) parts.push(section(source, list(from.map((edge) => this.linkEdge(edge, "source")))));
    if (to.length) parts.push(section(target, list(to.map((edge) => this.linkEdge(edge, "target")))));
    if (twins.length)
      parts.push(section("Forward and backward", list(twins.map((each) => this.linkNode(each)))));
    return parts;
  }

  /** Links the other end of an edge: as which argument it is read, and what flows. */
  private linkEdge(edge: number, end: "source" | "target"): HTMLElement {
    const { edges } = this.context.model.payload.tables;
    const [slot, dtype, shape] = ["slot", "dtype", "shape"].map((name) => edges.text(name, edge));
    return this.linkNode(edges.link(end, edge), [slot && `as ${slot}:`, dtype, shape]);
  }

  private linkNode(node: number, notes: readonly string[] = []): HTMLElement {
    const { model, select } = this.context;
    const path = model.nodePath(node);
    const link = button(shorten(path, 90), path.slice(0, 1000), () => {
      select({ node, module: model.moduleOfNode(node), site: -1 });
    });
    const note = [model.phase(node), ...notes].filter(Boolean).join(" ");
    return h("li", {}, link, h("span", { class: "dim", text: ` ${note}` }));
  }

  private describeModule(module: number): HTMLElement[] {
    const { model, select, store } = this.context;
    const { tables } = model.payload;
    const { modules } = tables;
    const moment = model.momentOf(store.state);
    const step = moment < 0 ? "" : ` at ${model.stepName(tables.module_steps.link("step", moment))}`;
    const columns = modules.columns.map((column) => model.moduleColumn(column, moment));
    const second = (name: string) =>
      moment >= 0 && model.isKept(name) ? undefined : model.second("modules", name);
    const noise = ({ name }: ColumnSpec) => noiseOfRatio(model, keyOfRatio(name));
    const parts = [section(`Module${step}`, facts(columns, module, second, noise))];
    const members = model.membersOf.get(module);
    if (members.length) {
      const links = members.map((row) =>
        h(
          "li",
          {},
          button(model.modulePath(row), "Select this one of the equal modules", () => {
            select({ module: row, node: -1, site: -1 });
          }),
        ),
      );
      parts.push(section(`Same inside (${members.length})`, list(links)));
    }
    const parameters = model.parametersOf.get(module);
    if (parameters.length) parts.push(section("Parameters", this.listParameters(parameters)));
    const { parameters: table } = model.payload.tables;
    const listed = new Set(
      parameters.flatMap((row) => [table.link("site", row), table.link("gradient", row)]),
    );
    const sites = model.sitesOf.get(module).filter((site) => !listed.has(site));
    if (sites.length)
      parts.push(
        section(`Measured at ${model.stepName(this.context.store.state.step)}`, this.listSites(sites)),
      );
    parts.push(...this.showHistogram(model.sitesOf.get(module)));
    const calls = model.nodesOf.get(module).filter((node) => model.isLayer(node));
    if (calls.length) parts.push(section("Calls", list(calls.map((node) => this.linkNode(node)))));
    return parts;
  }

  /** The parameters of a module, with what was measured of them and of their gradients at the chosen step. */
  private listParameters(rows: readonly number[]): HTMLElement {
    const { parameters } = this.context.model.payload.tables;
    const [statistic] = this.context.model.statistics();
    const measured = (["site", "gradient"] as const).filter((end) =>
      rows.some((row) => statistic && parameters.link(end, row) >= 0),
    );
    const titles = { site: `${statistic?.spec.name}`, gradient: `gradient ${statistic?.spec.name}` };
    const body = rows.map((row) => {
      const name = parameters.text("label", row);
      const site = parameters.link("site", row);
      return h(
        "tr",
        {},
        h("td", {}, site >= 0 ? this.linkSite(site, name) : shorten(name, 40)),
        h("td", { class: "mono", text: parameters.text("shape", row) }),
        h("td", { class: "mono", text: parameters.text("dtype", row) }),
        ...measured.map((end) => this.makeCell(statistic, parameters.link(end, row))),
      );
    });
    return smallTable(["name", "shape", "dtype", ...measured.map((end) => titles[end])], body);
  }

  private listSites(sites: readonly number[]): HTMLElement {
    const { model } = this.context;
    const columns = model.statistics().slice(0, 4);
    const body = sites.map((site) => {
      const { sites: table } = model.payload.tables;
      const name = table.text("role", site) + table.text("slot", site);
      return h(
        "tr",
        {},
        h("td", {}, this.linkSite(site, name)),
        ...columns.map((column) => this.makeCell(column, site)),
      );
    });
    return smallTable(["tensor", ...columns.map(({ spec }) => spec.name)], body);
  }

  private linkSite(site: number, name: string): HTMLElement {
    const { model, select, store } = this.context;
    const about = `${model.siteName(site)}: show its values over the steps`;
    return button(shorten(name, 40), about, () => {
      select({ site, view: "values" });
      store.update({ role: "" });
    });
  }

  /** A statistic of a site at the chosen step; of none, an empty cell. */
  private makeCell(column: Column, site: number): HTMLElement {
    const { model, store } = this.context;
    if (site < 0) return h("td");
    const position = model.seriesPosition(store.state.step);
    const value = model.seriesValue(column, site, position);
    const bad = model.payload.tables.series.column("nonfinite");
    const isBad = Number.isNaN(value) && bad !== undefined && model.seriesValue(bad, site, position) > 0;
    return h("td", {
      class: isBad ? "number badtext" : "number",
      text: isBad ? "NaN" : formatNumber(value),
      title: column.spec.label,
    });
  }

  private showHistogram(sites: readonly number[]): HTMLElement[] {
    const { model, store } = this.context;
    const site = sites.includes(store.state.site) ? store.state.site : sites[0];
    const histogram = histogramAt(model, site, store.state.step);
    if (!histogram) return [];
    return [section(`Magnitudes of ${shorten(model.siteName(site), 60)}`, drawHistogram(histogram))];
  }
}

function smallTable(head: readonly string[], body: readonly HTMLElement[]): HTMLElement {
  const titles = h("tr", {}, ...head.map((text) => h("th", { text })));
  return h(
    "div",
    { class: "scroll" },
    h("table", { class: "small" }, h("thead", {}, titles), h("tbody", {}, ...body)),
  );
}

function section(title: string, content: HTMLElement): HTMLElement {
  return h("section", {}, h("h3", { text: title }), content);
}

function list(items: readonly HTMLElement[]): HTMLElement {
  if (items.length <= MOST_LINKS) return h("ul", {}, ...items);
  const rest = h("ul", {}, ...items.slice(MOST_LINKS, 500));
  const more = h("details", {}, h("summary", { text: `${items.length - MOST_LINKS} more` }), rest);
  return h("div", {}, h("ul", {}, ...items.slice(0, MOST_LINKS)), more);
}

/** Lists the columns of a row that have a value; those of one measure by phase together. */
function facts(
  columns: readonly Column[],
  row: number,
  second: (name: string) => Column | undefined,
  noise: (spec: ColumnSpec) => Noise | null,
): HTMLElement {
  const found = h("dl", {});
  const measures = new Set(columns.filter(({ spec }) => !spec.phase).map(({ spec }) => spec.measure));
  for (const column of columns) {
    const { spec } = column;
    if (HIDDEN.has(spec.name) || (spec.phase && measures.has(spec.measure))) continue;
    const value = column.number(row);
    const parts = spec.measure
      ? columns.filter((each) => each.spec.phase && each.spec.measure === spec.measure)
      : [];
    const byPhase = parts
      .map((each) => [formatValue(each, each.number(row)), each.spec.phase])
      .filter(([text]) => text);
    const detail = byPhase.length > 1 ? byPhase.map(([text, phase]) => `${phase} ${text}`).join(" · ") : "";
    const text = formatValue(column, value);
    const isDull = spec.kind === "flag" && !value;
    const inB = inSecond(column, second(spec.name), row, noise(spec));
    if ((text && !isDull) || inB)
      found.append(
        h("dt", { text: column.spec.label, title: column.spec.about }),
        h(
          "dd",
          {
            text: inB
              ? `A ${shorten(inFirst(column, second(spec.name), row) || "–", 600)}`
              : shorten(text, 600),
            dir: "auto",
          },
          inB ? h("span", { class: "second", text: shorten(inB, 600) }) : null,
          detail ? h("small", { text: detail }) : null,
        ),
      );
  }
  return found;
}

/** Writes what finds the selection in Python. */
export function writeSelector({ model, store }: Pick<Context, "model" | "store">): string {
  const { module, node, site, step } = store.state;
  const { nodes, modules, sites, steps } = model.payload.tables;
  const quote = (text: string) => JSON.stringify(text);
  const path = modules.text("path", model.sameModules(module)[0] ?? module);
  if (site >= 0) {
    const slot = sites.text("slot", site);
    const role = sites.text("role", site);
    return `rec.history(${quote(path)}, ${quote(role)}${slot ? `, slot=${quote(slot)}` : ""})`;
  }
  const shownStep = model.payload.shownStep >= 0 ? model.payload.shownStep : step;
  const graph = `rec.graph(step=${steps.number("number", shownStep) || 0})`;
  if (node < 0) return `rec.frame("values").query(${quote(`path == ${quote(path)}`)})`;
  const phase = model.phase(node) ? `phase=${quote(model.phase(node))}, ` : "";
  const op = model.isLayer(node) ? "" : `, op=${quote(nodes.text("name", node))}`;
  return `${graph}.filter(${phase}path=${quote(path)}${op})`;
}
