/** The steps: a logged scalar as a line, and below it the slider that chooses one. */

import { findRange } from "../colors";
import type { Context } from "../context";
import { button, h } from "../dom";
import { formatNumber } from "../format";
import { CanvasPainter } from "../painter";
import { readTheme } from "../theme";
import { fitCanvas } from "./canvas";

const WIDTH = 150;
const HEIGHT = 18;

export class StepSlider {
  readonly element = h("div", { class: "steps" });
  private readonly canvas = h("canvas", {
    role: "img",
    "aria-label": "The loss, or the first logged number, over the steps",
  });
  private readonly slider = h("input", { type: "range", min: "0", step: "1", "aria-label": "Step" });
  private readonly median: HTMLButtonElement;
  private readonly label = h("span", { class: "steplabel", "aria-live": "polite" });
  private readonly rows: number[] = [];

  constructor(private readonly context: Context) {
    const { steps, series_steps: measured } = context.model.payload.tables;
    for (let row = 0; row < steps.rows; row++) this.rows.push(row);
    if (!this.rows.length)
      for (let at = 0; at < measured.rows; at++) this.rows.push(measured.link("step", at));
    this.slider.max = String(Math.max(0, this.rows.length - 1));
    this.slider.addEventListener("input", () => {
      this.choose(Number(this.slider.value));
    });
    const { medians } = context.model.payload;
    this.median = button("Median", `Show the median times of ${medians}, or the times of one step`, () => {
      context.store.update({ median: !context.store.state.median });
    });
    this.element.append(
      this.median,
      button("‹", "The step before", () => {
        this.move(-1);
      }),
      h("div", { class: "track" }, this.canvas, this.slider),
      button("›", "The next step", () => {
        this.move(1);
      }),
      this.label,
    );
  }

  private move(by: number): void {
    const at = Math.min(this.rows.length - 1, Math.max(0, Number(this.slider.value) + by));
    this.choose(at);
  }

  private choose(at: number): void {
    this.context.store.update({ step: this.rows[at], median: false });
  }

  /** Whether something in the view differs between steps. */
  private get moves(): boolean {
    const { model, store, overlays } = this.context;
    const { module_steps: kept, series_steps: measured, spans } = model.payload.tables;
    switch (store.state.view) {
      case "findings":
        return false;
      case "modules":
        return kept.rows > 1;
      case "graph":
        return (
          kept.rows > 1 || (measured.rows > 1 && overlays.choices.some(({ key }) => key.startsWith("@")))
        );
      case "timeline":
        return spans.rows > 0;
      case "values":
        return measured.rows > 1 || model.scalars().length > 0;
    }
  }

  update(): void {
    const { model, store } = this.context;
    const { step, median, view } = store.state;
    this.element.hidden = this.rows.length < 2 || !this.moves;
    if (this.element.hidden) return;
    const { medians } = model.payload;
    this.median.hidden = !medians || (view !== "modules" && view !== "graph");
    this.median.setAttribute("aria-pressed", String(median));
    const isMedian = median && !this.median.hidden;
    this.element.classList.toggle("median", isMedian);
    this.slider.value = String(Math.max(0, this.rows.indexOf(step)));
    const scalars = model.scalars();
    const scalar = scalars.find(({ spec }) => /loss/i.test(spec.label)) ?? scalars[0];
    const logged = scalar ? model.logged(scalar, step) : undefined;
    const value = logged === undefined ? "" : `  ${scalar.spec.label} ${formatNumber(logged) || "NaN"}`;
    const kind = model.payload.tables.steps.text("kind", step);
    const name = model.stepName(step) + (kind && kind !== "train" ? ` (${kind})` : "") + value;
    this.label.textContent = isMedian ? medians : name;
    this.slider.setAttribute("aria-valuetext", this.label.textContent);
    this.draw(scalar ? this.rows.map((row) => model.logged(scalar, row)) : []);
  }

  private draw(values: readonly (number | undefined)[]): void {
    const painter = new CanvasPainter(fitCanvas(this.canvas, WIDTH, HEIGHT));
    const theme = readTheme();
    const { low, high } = findRange(values.map((value) => value ?? NaN));
    const range = high - low || 1;
    const x = (at: number) => 8 + (at / Math.max(1, this.rows.length - 1)) * (WIDTH - 16);
    const points = values.flatMap((value, at) =>
      value !== undefined && Number.isFinite(value)
        ? [x(at), HEIGHT - 2 - ((value - low) / range) * (HEIGHT - 4)]
        : [],
    );
    if (points.length > 2) painter.line(points, { color: theme.accent, width: 1.5 });
    values.forEach((value, at) => {
      if (value !== undefined && !Number.isFinite(value)) painter.rect(x(at) - 1, 0, 2, HEIGHT, theme.bad);
    });
    const at = x(Number(this.slider.value));
    painter.line([at, 0, at, HEIGHT], { color: theme.text });
  }
}
