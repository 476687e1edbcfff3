/** The tree table: a row for each module, the columns that are chosen, and only the rows on screen in the document. */

import { badgeOfModule } from "../badges";
import { Scale } from "../colors";
import type { Context, TextTable, View } from "../context";
import { inSecondAlone, isRatio, listRatios, withoutNoise } from "../difference";
import { button, h, replaceChildren } from "../dom";
import { formatValue, shorten } from "../format";
import type { Column } from "../payload";
import type { State } from "../state";
import { howTogether, shade, widthOf } from "./cells";

const ROW = 24;
/** Columns that make the tree, and are no columns of the table. */
const STRUCTURE = new Set(["label", "path", "root", "parent", "role", "folded", "count", "origin", "order"]);
const SPARE = 8;

export class ModuleTable implements View {
  readonly element = h("section", { class: "view modules", "aria-label": "Modules" });
  private readonly head = h("div", { class: "row head", role: "row" });
  private readonly body = h("div", { class: "rows", role: "rowgroup" });
  private readonly grid = h("div", {
    class: "grid",
    role: "treegrid",
    tabindex: "0",
    "aria-label": "Tree of modules",
  });
  private readonly bar = h("div", { class: "bar" });
  private readonly hint = h("span", { class: "dim hint" });
  private readonly chooser = h("div", { class: "popup", role: "group", "aria-label": "Columns" });
  private columns: readonly Column[] = [];
  /** The moment whose numbers the columns have. */
  private moment = NaN;
  private top = 0;
  private readonly scales = new Map<string, Scale>();
  private rows: number[] = [];
  private depths = new Map<number, number>();

  constructor(private readonly context: Context) {
    this.readColumns();
    this.grid.append(h("div", { role: "rowgroup", class: "headgroup" }, this.head), this.body);
    this.element.append(this.bar, this.grid);
    this.makeBar();
    this.grid.addEventListener("scroll", () => {
      this.top = this.grid.scrollTop;
      this.drawRows();
    });
    this.body.addEventListener("click", (event) => {
      this.onClick(event);
    });
    new ResizeObserver(() => {
      this.drawRows();
    }).observe(this.grid);
  }

  private get state(): State {
    return this.context.store.state;
  }

  private readColumns(): void {
    const { model } = this.context;
    const moment = model.momentOf(this.state);
    if (moment === this.moment) return;
    this.moment = moment;
    const found = model.payload.tables.modules.columns.filter(({ spec }) => !STRUCTURE.has(spec.name));
    const at = found.findIndex(({ spec }) => spec.name === "difference") + 1;
    found.splice(at, 0, ...listRatios(model));
    this.columns = found.map((column) => model.moduleColumn(column, moment));
  }

  private get shown(): readonly Column[] {
    const names = this.state.columns;
    if (names) return names.flatMap((name) => this.columns.filter(({ spec }) => spec.name === name));
    const proposed = this.columns.filter(({ spec }) => spec.default);
    return proposed.length ? proposed : this.columns.slice(0, 6);
  }

  private makeBar(): void {
    const { store } = this.context;
    const chooser = h("details", { class: "menu" }, h("summary", { text: "Columns" }), this.chooser);
    this.bar.append(
      chooser,
      button("Flat list", "Show all modules as one list, which can be sorted as a whole", () => {
        store.update({ flat: !this.state.flat });
      }),
      button("Open all", "Open all modules", () => {
        this.openAll();
      }),
      button("Close all", "Close all modules", () => {
        store.update({ open: new Set(), flat: false });
      }),
      this.hint,
    );
  }

  private openAll(): void {
    const { modules } = this.context.model;
    const all = Array.from(modules.order).filter((row) => modules.children(row).length);
    this.context.store.update({ open: new Set(all), flat: false });
  }

  update(changed: ReadonlySet<keyof State>): void {
    this.bar.children[1].setAttribute("aria-pressed", String(this.state.flat));
    this.readColumns();
    this.hint.textContent = this.context.model.describeMoment(this.state);
    if (changed.has("columns") || !this.chooser.childElementCount) this.makeChooser();
    this.listRows();
    this.drawHead();
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.grid.setAttribute("aria-rowcount", String(this.rows.length + 1));
    if (changed.has("module") || changed.has("view")) this.scrollTo(this.shownRow(this.state.module));
    this.drawRows();
  }

  resume(before: View): void {
    if (before instanceof ModuleTable) this.grid.scrollTop = before.top;
  }

  private makeChooser(): void {
    const shown = new Set(this.shown.map(({ spec }) => spec.name));
    const boxes = this.columns.map(({ spec }) => {
      const box = h("input", { type: "checkbox", checked: shown.has(spec.name) });
      box.addEventListener("change", () => {
        if (box.checked) shown.add(spec.name);
        else shown.delete(spec.name);
        const names = this.columns.map((column) => column.spec.name).filter((name) => shown.has(name));
        this.context.store.update({ columns: names });
      });
      return h("label", { title: spec.about }, box, h("span", { text: spec.label }));
    });
    replaceChildren(this.chooser, ...boxes);
  }

  private listRows(): void {
    this.depths = new Map();
    if (this.state.flat) {
      this.rows = Array.from(this.context.model.modules.order).filter(
        (row) => !this.context.model.membersOf.get(row).length,
      );
      this.sort(this.rows);
      return;
    }
    this.rows = [];
    const stack = this.inside(-1)
      .map((row) => [row, 0])
      .reverse();
    while (stack.length) {
      const [row, depth] = stack.pop()!;
      this.rows.push(row);
      this.depths.set(row, depth);
      if (!this.state.open.has(row)) continue;
      const inside = this.inside(row);
      for (let at = inside.length - 1; at >= 0; at--) stack.push([inside[at], depth + 1]);
    }
  }

  private inside(row: number): number[] {
    return this.sort([...this.context.model.modulesInside(row, this.state.each.has(row))]);
  }

  private sort(rows: number[]): number[] {
    const name = this.state.sort.replace(/^-/, "");
    const column = this.columns.find(({ spec }) => spec.name === name);
    if (!column) return rows;
    const sign = this.state.sort.startsWith("-") ? -1 : 1;
    const isText = column.dictionary !== null;
    return rows.sort((a, b) => {
      if (isText) return sign * column.text(a).localeCompare(column.text(b));
      const [one, other] = [column.number(a), column.number(b)];
      if (Number.isNaN(one) || Number.isNaN(other))
        return Number(Number.isNaN(one)) - Number(Number.isNaN(other));
      return sign * (one - other);
    });
  }

  /** The row of the table that shows a module: its own, or that of the sum it is in. */
  private shownRow(module: number): number {
    const { model } = this.context;
    if (module < 0 || this.rows.includes(module)) return module;
    const folded = model.payload.tables.modules.link("folded", module);
    return folded >= 0 ? folded : module;
  }

  private drawHead(): void {
    const { sort } = this.state;
    const widths = this.shown.map((column) => widthOf(column));
    this.grid.style.setProperty(
      "--columns",
      `minmax(var(--name), 1fr) ${widths.map((each) => `${each}px`).join(" ")}`,
    );
    this.grid.style.setProperty("--numbers", `${widths.reduce((sum, each) => sum + each, 0)}px`);
    const cells = this.shown.map((column, at) => {
      const { spec } = column;
      const direction = sort === spec.name ? "ascending" : sort === `-${spec.name}` ? "descending" : "none";
      const arrow = { ascending: " ▲", descending: " ▼", none: "" }[direction];
      const next = { ascending: "", descending: spec.name, none: `-${spec.name}` }[direction];
      const together = howTogether(column);
      const ofSeveral = together ? `A row ×N has ${together.about} (${together.sign}).` : "";
      const about = [`${spec.label}.`, spec.about, ofSeveral, "Click to sort."].filter(Boolean).join(" ");
      const label = button(spec.label + arrow, about, () => {
        this.context.store.update({ sort: next });
      });
      label.setAttribute("aria-label", `Sort by ${spec.label}`);
      return h(
        "div",
        {
          role: "columnheader",
          "aria-sort": direction,
          class: column.dictionary ? "" : "number",
          "aria-colindex": at + 2,
        },
        label,
      );
    });
    const title = this.context.model.second("modules", "label") ? "module = name in B" : "module";
    replaceChildren(
      this.head,
      h("div", { role: "columnheader", text: title, "aria-colindex": "1" }),
      ...cells,
    );
  }

  private drawRows(): void {
    const first = Math.max(0, Math.floor(this.grid.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, first + Math.ceil(this.grid.clientHeight / ROW) + 2 * SPARE);
    const selected = this.shownRow(this.state.module);
    const hits = new Set(this.context.hits.modules);
    const made: HTMLElement[] = [];
    this.grid.removeAttribute("aria-activedescendant");
    for (let at = first; at < last; at++) made.push(this.makeRow(at, selected, hits));
    if (!this.rows.length) made.push(h("div", { class: "empty", text: "This recording has no modules." }));
    this.body.replaceChildren(...made);
  }

  private makeRow(at: number, selected: number, hits: ReadonlySet<number>): HTMLElement {
    const { model } = this.context;
    const row = this.rows[at];
    const isGroup = !this.state.flat && model.modules.children(row).length > 0;
    const isOpen = this.state.open.has(row);
    const element = h(
      "div",
      {
        class: `row${row === selected ? " selected" : ""}${hits.has(row) ? " hit" : ""}`,
        role: "row",
        "data-row": row,
        "aria-level": (this.depths.get(row) ?? 0) + 1,
        "aria-rowindex": at + 2,
        "aria-selected": row === selected,
        "aria-expanded": isGroup ? String(isOpen) : null,
        id: `module-${row}`,
      },
      this.makeName(row, isGroup, isOpen),
      ...this.shown.map((column) => this.makeCell(column, row)),
    );
    element.style.top = `${at * ROW}px`;
    if (row === selected) this.grid.setAttribute("aria-activedescendant", element.id);
    return element;
  }

  private makeName(row: number, isGroup: boolean, isOpen: boolean): HTMLElement {
    const { model } = this.context;
    const { modules } = model.payload.tables;
    const name = this.state.flat ? model.modulePath(row) : model.moduleName(row);
    const count = modules.number("count", row);
    const second = model.otherName("modules", row);
    const other = second
      ? h("span", {
          class: "dim other",
          text: `= ${shorten(second, 80)}`,
          title: `In B: ${second}`,
          dir: "auto",
        })
      : null;
    const times =
      model.hasMembers(row) && count > 1 && !name.includes("×")
        ? h("span", {
            class: "times",
            text: `×${count}`,
            title: `${count} equal modules. Σ marks sums over all of them, max what is largest, all what is over the elements of all.`,
          })
        : null;
    const each =
      model.hasMembers(row) && isOpen
        ? h("span", {
            class: "each",
            text: this.state.each.has(row) ? "show sum" : "show each",
            title: "Show the sum of the equal modules, or each of them",
          })
        : null;
    const badge = model.hasBadges(this.state) ? badgeOfModule(model, row) : undefined;
    const bad = badge
      ? h("span", { class: badge.isOrigin ? "bad origin" : "bad", text: badge.text, title: badge.title })
      : null;
    const cell = h(
      "div",
      { role: "gridcell", class: "name", title: shorten(model.modulePath(row), 400) },
      h("span", { class: "twist", text: isGroup ? (isOpen ? "▾" : "▸") : "" }),
      h("span", { class: "label", text: shorten(name, 200), dir: "auto" }),
      other,
      times,
      bad,
      each,
    );
    cell.style.paddingLeft = `${6 + (this.depths.get(row) ?? 0) * 16}px`;
    return cell;
  }

  private makeCell(column: Column, row: number): HTMLElement {
    const text =
      formatValue(column, column.number(row)) || inSecondAlone(this.context.model, column, row, this.moment);
    const together = this.isSummed(row) && text ? howTogether(column) : null;
    const cell = h(
      "div",
      {
        role: "gridcell",
        class: column.dictionary ? "" : "number",
        title: shorten(together ? `${text}: ${together.about}` : text, 400),
      },
      together ? h("small", { class: "together", text: together.sign }) : null,
      shorten(text, 120),
    );
    shade(cell, column, withoutNoise(this.context.model, column, row), text, () => this.scaleOf(column));
    return cell;
  }

  /** The scale of a column, which is the same at all moments. */
  private scaleOf(column: Column): Scale {
    const { spec } = column;
    const { modules, module_series: series } = this.context.model.payload.tables;
    const parts = () => [
      modules.column(spec.name)?.values ?? column.values,
      series.column(spec.name)?.values ?? [],
    ];
    const scale = this.scales.get(spec.name) ?? new Scale(parts(), undefined, isRatio(spec.name));
    this.scales.set(spec.name, scale);
    return scale;
  }

  /** Whether a row stands for several equal modules. */
  private isSummed(row: number): boolean {
    return this.context.model.payload.tables.modules.number("count", row) > 1;
  }

  private onClick(event: Event): void {
    const target = event.target as HTMLElement;
    const row = Number(target.closest<HTMLElement>(".row")?.dataset.row ?? -1);
    if (row < 0) return;
    if (target.classList.contains("each")) this.context.store.toggle("each", row);
    else if (target.classList.contains("twist")) this.context.store.toggle("open", row);
    else this.context.select({ module: row, node: -1, site: -1 });
    this.grid.focus({ preventScroll: true });
  }

  private scrollTo(module: number): void {
    const at = this.rows.indexOf(module);
    if (at < 0) return;
    const height = this.grid.clientHeight - this.head.offsetHeight;
    if (at * ROW < this.grid.scrollTop) this.grid.scrollTop = at * ROW;
    else if ((at + 1) * ROW > this.grid.scrollTop + height) this.grid.scrollTop = (at + 1) * ROW - height;
  }

  onKey(event: KeyboardEvent): boolean {
    const row = this.shownRow(this.state.module);
    const at = this.rows.indexOf(row);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 }[event.key];
    if (step !== undefined) {
      const next = Math.min(this.rows.length - 1, Math.max(0, at + step));
      if (this.rows.length) this.context.select({ module: this.rows[next], node: -1, site: -1 });
      return true;
    }
    const isGroup = row >= 0 && this.context.model.modules.children(row).length > 0;
    const isOpen = this.state.open.has(row);
    if (["ArrowRight", "e"].includes(event.key) && isGroup && !isOpen)
      this.context.store.toggle("open", row, true);
    else if (event.key === "c" && isOpen) this.context.store.toggle("open", row, false);
    else if (event.key === "E") this.openAll();
    else if (event.key === "C") this.context.store.update({ open: new Set(), flat: false });
    else if (event.key === "ArrowLeft" && row >= 0)
      if (isOpen) this.context.store.toggle("open", row, false);
      else if (this.context.model.modules.parent[row] >= 0)
        this.context.select({ module: this.context.model.modules.parent[row], node: -1, site: -1 });
      else return true;
    else return false;
    return true;
  }

  table(): TextTable {
    const { model } = this.context;
    return {
      caption: "Modules",
      head: ["module", ...this.shown.map(({ spec }) => spec.label)],
      body: this.rows
        .slice(0, 2000)
        .map((row) => [
          model.modulePath(row),
          ...this.shown.map((column) => formatValue(column, column.number(row))),
        ]),
    };
  }
}
