/** Values over the steps: logged scalars, a heat map of all layers, lines and histograms of what is selected or pinned. */

import { kindColor, NONFINITE, Scale } from "../colors";
import type { Context, Picture, TextTable, View } from "../context";
import { button, h, replaceChildren, select } from "../dom";
import { shorten } from "../format";
import type { Painter } from "../painter";
import type { Column } from "../payload";
import type { State } from "../state";
import { readTheme } from "../theme";
import { type Drawn, Drawing } from "./canvas";
import { CHART, type Chart, drawChart, drawScale, LEFT, ticks, valueText } from "./chart";
import { drawHistogram, histogramAt } from "./histogram";

/** The room above the heat map for its title and scale, below it for its axis, and for the name of a row. */
const HEAD = 66;
const AXIS = 34;
const LABEL = 13;
/** Colours of a heat map are by the logarithm where the greatest magnitude is more than this many times the least. */
const WIDEST = 10;
/** As many lines as there are colours to tell them apart. */
const MOST_LINES = 8;

export class ValuesView implements View, Drawn {
  readonly element = h("section", { class: "view values", "aria-label": "Values over the steps" });
  private readonly bar = h("div", { class: "bar" });
  private readonly drawing = new Drawing("Values over the steps. Press t for a table.", this);
  private readonly histograms = h("div", { class: "histograms" });
  /** Where the heat map was drawn: its top and the height of a row. */
  private heat = { y: 0, row: 0, sites: [] as readonly number[] };
  private charts: Chart[] = [];
  private readonly statisticsOf = new Map<string, Column[]>();

  constructor(private readonly context: Context) {
    this.element.append(this.bar, this.drawing.element, this.histograms);
  }

  private get state(): State {
    return this.context.store.state;
  }

  private get positions(): number {
    return this.context.model.payload.tables.series_steps.rows;
  }

  private get role(): string {
    const { sites } = this.context.model.payload.tables;
    return this.state.role || (this.site >= 0 ? sites.text("role", this.site) : "") || sites.text("role", 0);
  }

  private get statistic(): Column | undefined {
    return this.statistics.find(({ spec }) => spec.name === this.state.statistic) ?? this.statistics[0];
  }

  private get statistics(): Column[] {
    const { role } = this;
    let found = this.statisticsOf.get(role);
    if (!found) this.statisticsOf.set(role, (found = this.context.model.statisticsOf(role)));
    return found;
  }

  /** The selected site, or the first one of the selected module with the chosen role that was measured at the step. */
  private get site(): number {
    const { model } = this.context;
    const { site, module, role } = this.state;
    if (site >= 0) return site;
    if (module < 0) return -1;
    const sites = model.sameModules(module).flatMap((row) => [...model.sitesOf.get(row)]);
    const shown = role
      ? sites.filter((each) => model.payload.tables.sites.text("role", each) === role)
      : sites;
    const position = model.seriesPosition(this.state.step);
    return shown.find((each) => model.isMeasured(each, position)) ?? shown[0] ?? -1;
  }

  update(): void {
    this.drawBar();
    this.drawing.element.style.height = `${this.measure()}px`;
    this.drawing.draw();
    this.drawHistograms();
  }

  private drawBar(): void {
    const { model, store } = this.context;
    const { sites } = model.payload.tables;
    const roles = [...new Set(Array.from({ length: sites.rows }, (_, row) => sites.text("role", row)))];
    const isPinned = this.state.pins.includes(this.site);
    replaceChildren(
      this.bar,
      select(
        "Tensors",
        roles.map((role) => ({ value: role, text: model.roleName(role) })),
        this.role,
        (role) => {
          store.update({ role, site: -1 });
        },
      ),
      select(
        "Statistic",
        this.statistics.map(({ spec }) => ({ value: spec.name, text: spec.label })),
        this.statistic?.spec.name ?? "",
        (statistic) => {
          store.update({ statistic });
        },
      ),
      this.site >= 0
        ? button(
            isPinned ? "Unpin" : "Pin",
            "Keep the line and histogram of the selected tensor in this view",
            () => {
              this.togglePin();
            },
          )
        : null,
      ...this.state.pins.map((site, at) => this.makePin(site, at + 1)),
      h("span", { class: "dim hint", text: this.describeLines() }),
    );
  }

  /** What is to be known of the lines: the run that they are of, how evaluation is drawn, and about their tensors. */
  private describeLines(): string {
    const { model } = this.context;
    const told = [model.describeRun("values"), model.hasEvaluation ? "Dashed: evaluation." : ""];
    return [...told, model.roleAbout(this.role)].filter(Boolean).join(" ");
  }

  private makePin(site: number, color: number): HTMLElement {
    const box = h("i", { class: "swatch" });
    box.style.backgroundColor = kindColor(color);
    const pin = button("", `Select ${this.context.model.siteName(site).slice(0, 300)}`, () => {
      this.choose(site, this.state.step);
    });
    pin.append(box, shorten(this.lineName(site), 40));
    return pin;
  }

  private togglePin(): void {
    const others = this.state.pins.filter((each) => each !== this.site);
    const isPinned = others.length < this.state.pins.length;
    this.context.store.update({ pins: isPinned ? others : [...others, this.site].slice(-MOST_LINES) });
  }

  private choose(site: number, step: number): void {
    this.context.select({
      site,
      module: this.context.model.payload.tables.sites.link("module", site),
      node: -1,
      step,
    });
  }

  private listSites(): number[] {
    const { sites } = this.context.model.payload.tables;
    const role = sites.column("role");
    const code = role?.dictionary?.indexOf(this.role) ?? -1;
    const found: number[] = [];
    for (let site = 0; site < sites.rows; site++) if (role?.number(site) === code) found.push(site);
    return found;
  }

  private measure(): number {
    const sites = this.listSites();
    const row = sites.length <= 40 ? 15 : sites.length <= 120 ? 13 : 5;
    const charts = this.scalarCharts().length;
    const top = (charts ? CHART : 0) + (this.lines().length ? CHART : 0) + HEAD;
    this.heat = { y: top, row, sites };
    return this.heatEnd() + Math.max(0, charts - 1) * CHART;
  }

  private heatEnd(): number {
    const { y, row, sites } = this.heat;
    return y + Math.max(1, sites.length) * row + AXIS;
  }

  private lines(): number[] {
    return [...new Set([...(this.site >= 0 ? [this.site] : []), ...this.state.pins])];
  }

  private valuesOf(site: number): number[] {
    const { model } = this.context;
    const column = this.statistic;
    const nonfinite = model.payload.tables.series.column("nonfinite");
    return Array.from({ length: this.positions }, (_, position) => {
      const value = column ? model.seriesValue(column, site, position) : NaN;
      const isBad =
        Number.isNaN(value) && nonfinite !== undefined && model.seriesValue(nonfinite, site, position) > 0;
      return isBad ? Infinity : value;
    });
  }

  /** The name of a site, with its role where that is not the chosen one. */
  private lineName(site: number): string {
    const { model } = this.context;
    const role = model.payload.tables.sites.text("role", site);
    return role === this.role ? model.siteName(site) : `${model.roleName(role)} ${model.siteName(site)}`;
  }

  private colorOf(site: number): string {
    const pin = this.state.pins.indexOf(site);
    return pin >= 0 ? kindColor(pin + 1) : readTheme().accent;
  }

  paint(painter: Painter, width: number): void {
    const { model } = this.context;
    const theme = readTheme();
    const wide = width - LEFT - 30;
    this.charts = [];
    let y = 0;
    const [first, ...more] = this.scalarCharts();
    if (first) {
      this.paintScalars(painter, y, wide, first);
      y += CHART;
    }
    const lines = this.lines();
    if (lines.length) {
      const series = lines.map((site) => ({
        label: this.lineName(site),
        color: this.colorOf(site),
        values: this.valuesOf(site),
        isDashed: (at: number) => model.isEvaluation(model.payload.tables.series_steps.link("step", at)),
      }));
      const title = this.statistic?.spec.label ?? "";
      const position = model.seriesPosition(this.state.step);
      this.charts.push(drawChart(painter, y, wide, title, series, (at) => this.stepNumber(at), position));
      y += CHART;
    }
    if (!this.heat.sites.length)
      painter.text("This recording has no values over the steps.", 12, y + 24, { color: theme.dim });
    else this.paintHeat(painter, wide);
    more.forEach((scalars, at) => {
      this.paintScalars(painter, this.heatEnd() + at * CHART, wide, scalars);
    });
  }

  /** The logged scalars, as many together as a chart has colours for; the first chart stands above the heat map. */
  private scalarCharts(): Column[][] {
    const scalars = this.context.model.scalars();
    const count = Math.ceil(scalars.length / MOST_LINES);
    return Array.from({ length: count }, (_, at) => scalars.slice(at * MOST_LINES, (at + 1) * MOST_LINES));
  }

  private paintScalars(painter: Painter, y: number, width: number, scalars: readonly Column[]): void {
    const { steps } = this.context.model.payload.tables;
    const rows = Array.from({ length: steps.rows }, (_, row) => row);
    const series = scalars.map((column, at) => ({
      label: column.spec.label,
      color: kindColor(at),
      values: rows.map((row) => this.loggedOrNothing(column, row)),
      isDashed: (row: number) => this.context.model.isEvaluation(row),
    }));
    const name = (row: number) => String(steps.number("number", row));
    this.charts.push(drawChart(painter, y, width, "Logged", series, name, this.state.step));
  }

  /** A logged NaN is drawn as what is not finite, and nothing where nothing was logged. */
  private loggedOrNothing(column: Column, step: number): number {
    const logged = this.context.model.logged(column, step);
    return logged === undefined ? NaN : Number.isNaN(logged) ? Infinity : logged;
  }

  private stepNumber(position: number): string {
    const { series_steps: measured, steps } = this.context.model.payload.tables;
    const row = measured.link("step", position);
    const number = steps.number("number", row);
    return String(Number.isNaN(number) ? row : number);
  }

  private paintHeat(painter: Painter, width: number): void {
    const { model } = this.context;
    const theme = readTheme();
    const { y, row, sites } = this.heat;
    const values = sites.map((site) => this.valuesOf(site));
    const scale = new Scale(values, WIDEST);
    const about = LEFT + width < 700 ? "" : ": a row for each layer, a column for each step";
    const title = `${this.statistic?.spec.label ?? ""} of ${model.roleName(this.role)}${about}`;
    painter.text(title, 12, y - HEAD + 20, { color: theme.text, bold: true });
    drawScale(painter, LEFT, y - HEAD + 34, Math.min(260, width), scale);
    const colors = values.map((line) =>
      line.map((value) => (Number.isNaN(value) ? null : value === Infinity ? NONFINITE : scale.color(value))),
    );
    painter.cells(LEFT, y, width, row * sites.length, colors);
    const every = Math.ceil(LABEL / row);
    const chosen = sites.indexOf(this.site);
    sites.forEach((site, at) => {
      const isChosen = site === this.site;
      if (isChosen)
        painter.rect(LEFT - 3, y + at * row - 0.5, width + 6, row + 1, null, { color: theme.text, width: 2 });
      const isCovered = chosen >= 0 && Math.abs(at - chosen) < every;
      if (isChosen || (at % every === 0 && !isCovered))
        painter.text(shorten(model.siteName(site), 36), LEFT - 8, y + at * row + Math.max(row, 11) - 2.5, {
          color: isChosen ? theme.accent : theme.dim,
          size: 11,
          align: "right",
          bold: isChosen,
        });
    });
    const column = model.seriesPosition(this.state.step);
    const cell = width / this.positions;
    const bottom = y + row * sites.length;
    for (const step of ticks(0, this.positions - 1, width / 90))
      if (Number.isInteger(step))
        painter.text(this.stepNumber(step), LEFT + (step + 0.5) * cell, bottom + 15, {
          color: theme.dim,
          size: 11,
          align: "center",
        });
    painter.rect(LEFT + column * cell, y - 2, Math.max(cell, 1.5), row * sites.length + 4, null, {
      color: theme.text,
    });
  }

  /** The site and the step below a point; -1 for none. */
  private at(x: number, y: number): [number, number] {
    const { row, sites } = this.heat;
    const width = this.drawing.width - LEFT - 30;
    const position = Math.max(
      0,
      Math.min(this.positions - 1, Math.floor(((x - LEFT) / width) * this.positions)),
    );
    const site = sites[Math.floor((y - this.heat.y) / row)] ?? -1;
    const { step } = this.state;
    return [
      site,
      x < LEFT || !this.positions
        ? step
        : this.context.model.payload.tables.series_steps.link("step", position),
    ];
  }

  pick(x: number, y: number): void {
    const [site, step] = this.at(x, y);
    if (site >= 0) this.choose(site, step);
  }

  describe(x: number, y: number): string {
    const [site, step] = this.at(x, y);
    if (site < 0) return this.charts.map((chart) => chart.describe(x, y)).find(Boolean) ?? "";
    const { model } = this.context;
    const text = valueText(this.valuesOf(site)[model.seriesPosition(step)]) || "not measured";
    return `${shorten(model.siteName(site), 200)}\n${model.stepName(step)}: ${text}`;
  }

  private drawHistograms(): void {
    const { model } = this.context;
    const shown = this.lines().flatMap((site) => {
      const histogram = histogramAt(model, site, this.state.step);
      return histogram
        ? [
            h(
              "figure",
              {},
              h("figcaption", { text: shorten(model.siteName(site), 60), dir: "auto" }),
              drawHistogram(histogram),
            ),
          ]
        : [];
    });
    replaceChildren(
      this.histograms,
      ...(shown.length
        ? [h("h2", { text: `Magnitudes at ${model.stepName(this.state.step)}` }), ...shown]
        : []),
    );
  }

  onKey(event: KeyboardEvent): boolean {
    const { model } = this.context;
    if (event.key === "p" && this.site >= 0) this.togglePin();
    else if (/^Arrow(Left|Right)$/.test(event.key)) {
      if (!this.positions) return false;
      const by = event.key === "ArrowRight" ? 1 : -1;
      const position = Math.max(0, Math.min(this.positions - 1, model.seriesPosition(this.state.step) + by));
      this.context.store.update({ step: model.payload.tables.series_steps.link("step", position) });
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const at = this.heat.sites.indexOf(this.site);
      const next = this.heat.sites[Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1))];
      if (next !== undefined) this.choose(next, this.state.step);
    } else return false;
    return true;
  }

  picture(): Picture {
    return this.drawing.picture();
  }

  table(): TextTable {
    const { model } = this.context;
    const positions = Array.from({ length: Math.min(this.positions, 60) }, (_, at) => at);
    return {
      caption: `${this.statistic?.spec.label ?? "Values"} of ${this.role}`,
      head: ["site", ...positions.map((at) => this.stepNumber(at))],
      body: this.heat.sites.slice(0, 500).map((site) => {
        const values = this.valuesOf(site);
        return [model.siteName(site), ...positions.map((at) => valueText(values[at]))];
      }),
    };
  }
}
