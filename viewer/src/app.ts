/** The page: the header, the views as tabs, and the details of the selection; all of them show one state. */

import type { Context, View } from "./context";
import { button, h, replaceChildren, textTable } from "./dom";
import { shorten } from "./format";
import { showHelp } from "./help";
import { Model } from "./model";
import { OverlayMaker } from "./overlay";
import type { Payload } from "./payload";
import { drawSvg, savePng, saveSvg } from "./save";
import { makeStart, reveal } from "./start";
import { type State, Store, VIEWS, type ViewName } from "./state";
import { chooseTheme, forgetTheme } from "./theme";
import { ComparedBar } from "./views/compared";
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
  private readonly ending = new AbortController();
  private readonly header: HTMLElement;
  private parts: HTMLElement[] = [];

  /** Shows a payload; as `before` did that of the same recording earlier, if that is given. */
  constructor(
    payload: Payload,
    private before: App | null = null,
  ) {
    const model = new Model(payload);
    const store = new Store(makeStart(model), this.ending.signal);
    const overlays = new OverlayMaker(model);
    this.context = {
      model,
      store,
      overlays,
      hits: { modules: [], nodes: [], problem: "" },
      overlay: null,
      signal: this.ending.signal,
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
    this.header = this.makeHeader();
  }

  /** Whether somebody types, or has opened what would close if the page were shown anew. */
  get isBusy(): boolean {
    const { activeElement } = document;
    const isTyping = activeElement instanceof HTMLInputElement && activeElement.value !== "";
    return (
      (isTyping && activeElement.type !== "range") ||
      document.querySelector("dialog[open], details.menu[open]") !== null
    );
  }

  /** Puts something below the tabs. */
  append(element: HTMLElement): void {
    this.header.append(element);
  }

  /** Takes the page away, and listens to nothing any more. */
  stop(): void {
    this.ending.abort();
    for (const part of this.parts) part.remove();
  }

  start(): void {
    const { payload } = this.context.model;
    document.title = `${shorten(payload.title, 80)} · modtrace`;
    this.parts = [
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
      this.header,
      h("div", { class: "columns" }, h("main", {}, this.main), this.detail.element),
      this.said,
    ];
    document.body.append(...this.parts);
    const { signal } = this.ending;
    this.context.store.listen((changed) => {
      this.update(changed);
    });
    const listen = (target: EventTarget, event: string, listener: (event: Event) => void) => {
      target.addEventListener(event, listener, { signal });
    };
    listen(document, "keydown", (event) => {
      this.onKey(event as KeyboardEvent);
    });
    listen(window, "beforeprint", () => {
      this.preparePrint();
    });
    listen(window, "afterprint", () => {
      this.main.querySelector(".printed")?.remove();
      this.update(EVERYTHING);
    });
    listen(window, "resize", () => {
      this.update(EVERYTHING);
    });
    listen(matchMedia("(prefers-color-scheme: dark)"), "change", () => {
      forgetTheme();
      this.update(EVERYTHING);
    });
    this.update(EVERYTHING);
    const earlier = this.before?.views.get(this.context.store.state.view);
    if (earlier) this.view.resume?.(earlier);
    this.before = null;
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
