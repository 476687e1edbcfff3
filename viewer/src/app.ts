/** The page: the header, the views as tabs, and the details of the selection; all of them show one state. */

import type { Context, View } from "./context";
import { verdictSign } from "./difference";
import { button, h, replaceChildren, textTable } from "./dom";
import { shorten } from "./format";
import { showHelp } from "./help";
import { Model } from "./model";
import { OverlayMaker } from "./overlay";
import type { Payload } from "./payload";
import { drawSvg, savePng, saveSvg } from "./save";
import { type State, Store, VIEWS, type ViewName } from "./state";
import { chooseTheme, forgetTheme } from "./theme";
import { ComparedBar, firstOf } from "./views/compared";
import { DetailPane } from "./views/detail";
import { FindingsView } from "./views/findings";
import { GraphView } from "./graph/view";
import { Legend } from "./views/legend";
import { ModuleTable } from "./views/modules";
import { SearchBox } from "./views/search_box";
import { StepSlider } from "./views/step_slider";
import { TimelineView } from "./views/timeline";
import { ValuesView } from "./views/values";

const TITLES: Record<ViewName, string> = {
  findings: "Findings",
  modules: "Modules",
  graph: "Graph",
  timeline: "Timeline",
  values: "Values",
};
const MAKERS: Record<ViewName, (context: Context) => View> = {
  findings: (context) => new FindingsView(context),
  modules: (context) => new ModuleTable(context),
  graph: (context) => new GraphView(context),
  timeline: (context) => new TimelineView(context),
  values: (context) => new ValuesView(context),
};
/** The most changes that are open at first. */
const MOST_CHANGED = 8;
const THEMES = ["auto", "light", "dark"] as const;
const EVERYTHING = new Set<keyof State>([
  "view",
  "module",
  "node",
  "site",
  "step",
  "median",
  "overlay",
  "query",
  "columns",
  "theme",
]);

export class App {
  private readonly context: Context;
  private readonly views = new Map<ViewName, View>();
  private readonly tabs = new Map<ViewName, HTMLButtonElement>();
  private readonly main = h("div", { id: "main", class: "panel", role: "tabpanel", tabindex: "-1" });
  private readonly said = h("div", { class: "said", role: "status", "aria-live": "polite" });
  private readonly detail: DetailPane;
  private readonly searchBox: SearchBox;
  private readonly slider: StepSlider;
  private readonly legend: Legend;
  private shown: ViewName | null = null;

  constructor(payload: Payload) {
    const model = new Model(payload);
    const store = new Store(makeStart(model));
    const overlays = new OverlayMaker(model);
    this.context = {
      model,
      store,
      overlays,
      hits: { modules: [], nodes: [], problem: "" },
      overlay: null,
      select: (selection) => {
        store.update({ ...reveal(model, store.state, selection), ...selection });
      },
      say: (text) => {
        this.said.textContent = text;
        setTimeout(() => (this.said.textContent = ""), 2500);
      },
    };
    this.detail = new DetailPane(this.context);
    this.searchBox = new SearchBox(this.context);
    this.slider = new StepSlider(this.context);
    this.legend = new Legend(this.context);
  }

  start(): void {
    const { payload } = this.context.model;
    document.title = `${shorten(payload.title, 80)} · modtrace`;
    document.body.append(
      h("a", {
        class: "skip",
        href: "#main",
        text: "Skip to the view",
        on: {
          click: (event) => {
            event.preventDefault();
            this.main.focus();
          },
        },
      }),
      this.makeHeader(),
      h("div", { class: "columns" }, h("main", {}, this.main), this.detail.element),
      this.said,
    );
    this.context.store.listen((changed) => {
      this.update(changed);
    });
    document.addEventListener("keydown", (event) => {
      this.onKey(event);
    });
    addEventListener("beforeprint", () => {
      this.preparePrint();
    });
    addEventListener("afterprint", () => {
      this.main.querySelector(".printed")?.remove();
      this.update(EVERYTHING);
    });
    addEventListener("resize", () => {
      this.update(EVERYTHING);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      forgetTheme();
      this.update(EVERYTHING);
    });
    this.update(EVERYTHING);
  }

  /** The view that is shown; each is made when it first is. */
  private get view(): View {
    const name = this.context.store.state.view;
    const view = this.views.get(name) ?? MAKERS[name](this.context);
    this.views.set(name, view);
    return view;
  }

  private makeHeader(): HTMLElement {
    const { payload } = this.context.model;
    const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    for (const name of VIEWS) {
      const count = name === "findings" && payload.findings.length ? ` (${payload.findings.length})` : "";
      const tab = button(TITLES[name] + count, `Show the view ${TITLES[name]}`, () => {
        this.context.store.update({ view: name });
      });
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", "main");
      this.tabs.set(name, tab);
      tabs.append(tab);
    }
    return h(
      "header",
      { class: "top" },
      h(
        "div",
        { class: "line" },
        h("h1", { text: shorten(payload.title, 60), title: payload.title.slice(0, 1000), dir: "auto" }),
        this.searchBox.element,
        this.makeMenu(),
      ),
      payload.compared ? new ComparedBar(this.context).element : null,
      h("div", { class: "line" }, tabs, this.legend.element, this.slider.element),
    );
  }

  private makeMenu(): HTMLElement {
    const { store } = this.context;
    return h(
      "div",
      { class: "tools" },
      button("Table", "Show what the view draws as a table", () => {
        this.showTable();
      }),
      button("PNG", "Save the picture of the view as PNG", () => {
        this.withPicture((picture, name) => {
          if (!savePng(picture, name))
            this.context.say("The picture is too large for all its pixels: SVG has them.");
        });
      }),
      button("SVG", "Save the picture of the view as SVG", () => {
        this.withPicture(saveSvg);
      }),
      button("◐", "Change between the colours of the system, light and dark", () => {
        store.update({ theme: THEMES[(THEMES.indexOf(store.state.theme) + 1) % THEMES.length] });
      }),
      button("?", "Show the keys", () => {
        showHelp();
      }),
    );
  }

  private update(changed: ReadonlySet<keyof State>): void {
    const { store } = this.context;
    const { state } = store;
    if (changed.has("theme")) chooseTheme(state.theme);
    if (changed.has("overlay") || changed.has("step") || changed.has("median"))
      this.context.overlay = this.context.overlays.get(state.overlay, state);
    if (changed.has("query")) this.searchBox.update();
    this.slider.update();
    this.legend.update();
    for (const [name, tab] of this.tabs) {
      tab.setAttribute("aria-selected", String(name === state.view));
      tab.tabIndex = name === state.view ? 0 : -1;
    }
    const isNew = this.shown !== state.view;
    if (isNew) replaceChildren(this.main, this.view.element);
    this.shown = state.view;
    this.main.setAttribute("aria-label", TITLES[state.view]);
    this.view.update(isNew ? EVERYTHING : changed);
    if ((["module", "node", "step", "median", "site"] as const).some((key) => changed.has(key)))
      this.detail.update();
  }

  private withPicture(
    write: (picture: NonNullable<ReturnType<NonNullable<View["picture"]>>>, name: string) => void,
  ): void {
    const { view } = this;
    if (view.picture) write(view.picture(), `modtrace-${this.context.store.state.view}`);
    else this.context.say("This view is no picture. Graph, Timeline and Values are.");
  }

  /** Puts the whole picture beside the view, or else its table: paper does not scroll, and it is light. */
  private preparePrint(): void {
    const { view } = this;
    chooseTheme("light");
    const content = this.context.store.state.view === "findings" ? undefined : view.table?.();
    const picture = view.picture?.();
    const printed = picture
      ? drawSvg(picture).root
      : content && textTable(content.caption, content.head, content.body);
    printed?.classList.add("printed");
    // What is far higher than a page goes on from page to page, and the rest fits into one.
    printed?.classList.toggle("tall", !picture || picture.height > 2 * picture.width);
    if (printed) this.main.append(printed);
  }

  private showTable(): void {
    const content = this.view.table?.();
    if (!content) return;
    const table = textTable(content.caption, content.head, content.body);
    const close = button("Close", "Close the table", () => {
      dialog.close();
    });
    const dialog = h(
      "dialog",
      { class: "sheet", "aria-label": content.caption },
      close,
      h("div", { class: "scroll", tabindex: "0" }, table),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  }

  private onKey(event: KeyboardEvent): void {
    const { target } = event;
    if (!(target instanceof HTMLElement)) return;
    const isTyping =
      /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && (target as HTMLInputElement).type !== "range";
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    const isSliding = target.tagName === "INPUT" && /^(Arrow|Page|Home|End)/.test(event.key);
    if (isSliding) return;
    const isOnTab = target.getAttribute("role") === "tab" && /^Arrow(Left|Right)$/.test(event.key);
    if (isOnTab) this.moveTab(event.key === "ArrowRight" ? 1 : -1);
    else if (event.key === "/") this.searchBox.focus();
    else if (event.key === "?") showHelp();
    else if (event.key === "t") this.showTable();
    else if (/^[1-5]$/.test(event.key)) this.context.store.update({ view: VIEWS[Number(event.key) - 1] });
    else if (event.key === "Escape") this.close();
    else if (/^(BUTTON|SUMMARY)$/.test(target.tagName) && event.key === " ") return;
    else if (!this.view.onKey?.(event)) return;
    event.preventDefault();
  }

  /** Closes the menu that is open, or else selects nothing. */
  private close(): void {
    const menu = document.querySelector<HTMLDetailsElement>("details.menu[open]");
    if (menu) menu.open = false;
    else this.context.select({ module: -1, node: -1, site: -1 });
  }

  private moveTab(by: number): void {
    const at = VIEWS.indexOf(this.context.store.state.view);
    const view = VIEWS[(at + by + VIEWS.length) % VIEWS.length];
    this.context.store.update({ view });
    this.tabs.get(view)?.focus();
  }
}

/** What the page opens on: the findings if there are any, else the modules, with the outermost ones open. */
function makeStart(model: Model): State {
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
function reveal(model: Model, state: State, selection: Partial<State>): Partial<State> {
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
