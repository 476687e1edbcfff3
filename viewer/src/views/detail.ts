/** The pane of the selection: what it is, what was measured there, where it comes from and where it goes. */

import type { Context } from "../context";
import { button, h, replaceChildren } from "../dom";
import { formatNumber, formatValue, shorten } from "../format";
import type { Table } from "../payload";
import { drawHistogram, histogramAt } from "./histogram";

/** Columns that say where a row stands, and are no facts of their own. */
const HIDDEN = new Set([
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
]);
const MOST_LINKS = 12;

export class DetailPane {
  readonly element = h("aside", {
    class: "detail",
    "aria-label": "Details of the selection",
    tabindex: "-1",
  });

  constructor(private readonly context: Context) {}

  update(): void {
    const { module, node } = this.context.store.state;
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
      this.makeActions(),
    );
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
      button("Copy as Python", "Copy an expression that finds this in the recording", () => {
        this.copy();
      }),
    );
  }

  /** Leads to the gradients of the module over the steps. */
  private makeGradientLink(): HTMLElement | null {
    const { model, store, select } = this.context;
    const sites = model.sameModules(store.state.module).flatMap((row) => [...model.sitesOf.get(row)]);
    const isGradient = (site: number) => model.payload.tables.sites.text("role", site).includes("grad");
    const site = sites.find(isGradient);
    if (site === undefined) return null;
    return button("Gradients", "Show its gradients over the steps", () => {
      select({ site, view: "values" });
      store.update({ role: "", pins: sites.filter(isGradient).slice(0, 6) });
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
    const parts = [section("In this call", facts(nodes, node))];
    const twin = nodes.link("twin", node);
    const twins = [...(twin >= 0 ? [twin] : []), ...model.twinsOf.get(node)];
    const links = (rows: readonly number[]) => rows.map((row) => this.linkNode(row));
    const from = model.into.get(node).map((edge) => model.payload.tables.edges.link("source", edge));
    const to = model.outOf.get(node).map((edge) => model.payload.tables.edges.link("target", edge));
    if (from.length) parts.push(section("Reads from", list(links(from))));
    if (to.length) parts.push(section("Read by", list(links(to))));
    if (twins.length) parts.push(section("Forward and backward", list(links(twins))));
    return parts;
  }

  private linkNode(node: number): HTMLElement {
    const { model, select } = this.context;
    const path = model.nodePath(node);
    const link = button(shorten(path, 90), path.slice(0, 1000), () => {
      select({ node, module: model.moduleOfNode(node), site: -1 });
    });
    const shape = model.payload.tables.nodes.text("shape", node);
    const note = [model.phase(node), shape].filter(Boolean).join(" ");
    return h("li", {}, link, h("span", { class: "dim", text: ` ${note}` }));
  }

  private describeModule(module: number): HTMLElement[] {
    const { model, select } = this.context;
    const { modules } = model.payload.tables;
    const parts = [section("Module", facts(modules, module))];
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
    const sites = model.sitesOf.get(module);
    if (sites.length)
      parts.push(
        section(`Measured at ${model.stepName(this.context.store.state.step)}`, this.listSites(sites)),
        ...this.showHistogram(sites),
      );
    const calls = model.nodesOf.get(module).filter((node) => model.isLayer(node));
    if (calls.length) parts.push(section("Calls", list(calls.map((node) => this.linkNode(node)))));
    return parts;
  }

  private listParameters(rows: readonly number[]): HTMLElement {
    const { parameters } = this.context.model.payload.tables;
    const lines = rows.map((row) =>
      ["label", "shape", "dtype"]
        .map((name) => parameters.text(name, row))
        .filter(Boolean)
        .join("  "),
    );
    return h("ul", {}, ...lines.map((text) => h("li", { class: "mono", text: shorten(text, 200) })));
  }

  private listSites(sites: readonly number[]): HTMLElement {
    const { model, store, select } = this.context;
    const position = model.seriesPosition(store.state.step);
    const columns = model.statistics().slice(0, 4);
    const head = h(
      "tr",
      {},
      h("th", { text: "tensor" }),
      ...columns.map(({ spec }) => h("th", { text: spec.name, title: spec.label })),
    );
    const rows = sites.map((site) => {
      const name =
        model.payload.tables.sites.text("role", site) + model.payload.tables.sites.text("slot", site);
      const link = button(
        shorten(name, 40),
        `${model.siteName(site)}: show its values over the steps`,
        () => {
          select({ site, view: "values" });
        },
      );
      const bad = model.payload.tables.series.column("nonfinite");
      const isBad = bad !== undefined && model.seriesValue(bad, site, position) > 0;
      const cells = columns.map((column) => {
        const value = model.seriesValue(column, site, position);
        return h("td", {
          class: isBad && Number.isNaN(value) ? "number badtext" : "number",
          text: isBad && Number.isNaN(value) ? "NaN" : formatNumber(value),
        });
      });
      return h("tr", {}, h("td", {}, link), ...cells);
    });
    return h(
      "div",
      { class: "scroll" },
      h("table", { class: "small" }, h("thead", {}, head), h("tbody", {}, ...rows)),
    );
  }

  private showHistogram(sites: readonly number[]): HTMLElement[] {
    const { model, store } = this.context;
    const site = sites.includes(store.state.site) ? store.state.site : sites[0];
    const histogram = histogramAt(model, site, store.state.step);
    if (!histogram) return [];
    return [section(`Magnitudes of ${shorten(model.siteName(site), 60)}`, drawHistogram(histogram))];
  }
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
function facts(table: Table, row: number): HTMLElement {
  const found = h("dl", {});
  const measures = new Set(table.columns.filter(({ spec }) => !spec.phase).map(({ spec }) => spec.measure));
  for (const column of table.columns) {
    const { spec } = column;
    if (HIDDEN.has(spec.name) || (spec.phase && measures.has(spec.measure))) continue;
    const value = column.number(row);
    const parts = spec.measure
      ? table.columns.filter((each) => each.spec.phase && each.spec.measure === spec.measure)
      : [];
    const byPhase = parts
      .map((each) => [formatValue(each, each.number(row)), each.spec.phase])
      .filter(([text]) => text);
    const detail = byPhase.length > 1 ? byPhase.map(([text, phase]) => `${phase} ${text}`).join(" · ") : "";
    const text = formatValue(column, value);
    const isDull = spec.kind === "flag" && !value;
    if (text && !isDull)
      found.append(
        h("dt", { text: column.spec.label, title: column.spec.about }),
        h("dd", { text: shorten(text, 600), dir: "auto" }, detail ? h("small", { text: detail }) : null),
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
