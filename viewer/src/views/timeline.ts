/** The timeline: a lane for each phase and thread, in it the calls and ops as they nest, over time. */

import { textOn } from "../colors";
import type { Context, Picture, TextTable, View } from "../context";
import type { Values } from "../overlay";
import { button, h } from "../dom";
import { formatSeconds, shorten } from "../format";
import type { Painter } from "../painter";
import { readTheme } from "../theme";
import { type Drawn, Drawing } from "./canvas";
import { drawAxis } from "./chart";
import { sumUp, tabulateSums } from "./sums";
import { firstAfter, fitLabel, HOW, makeTracks, rangeOf, rangeOfStep, ROW, TOP, TRACK_GAP } from "./tracks";
import type { Track } from "./tracks";

const LABEL = 132;
/** Spans that are narrower than this are drawn as one. */
const THIN = 1;
/** How long the picture rests before its sums are made. */
const REST_MS = 120;

export class TimelineView implements View, Drawn {
  readonly element = h("section", { class: "view timeline", "aria-label": "Timeline" });
  private readonly drawing = new Drawing("Timeline of calls and ops. Press t for a table.", this);
  private readonly sums = h("div", {
    class: "sums scroll",
    tabindex: "0",
    role: "region",
    "aria-label": "Sums",
  });
  private readonly tracks: readonly Track[];
  /** The range that was selected, in seconds; null for what is on the screen. */
  private range: [number, number] | null = null;
  private waiting = 0;
  private from = 0;
  private to = 1;
  private scroll = 0;
  /** The chosen step that the view has turned to, or that was chosen in it. */
  private followed = -1;

  constructor(private readonly context: Context) {
    this.tracks = makeTracks(context.model);
    const bar = h(
      "div",
      { class: "bar" },
      button("This step", "Show the step that is chosen", () => {
        this.showStep();
        this.drawing.draw();
      }),
      button("All steps", "Show the whole recording", () => {
        this.showAll();
        this.drawing.draw();
      }),
      button("Selection", "Zoom to the selected call", () => {
        this.showSelection();
      }),
      h("span", { class: "dim", text: `${context.model.describeRun("times")} ${HOW}`.trim() }),
    );
    this.drawing.element.style.height = `${this.high + 8}px`;
    this.element.append(bar, this.drawing.element, this.sums);
  }

  private get spans() {
    return this.context.model.payload.tables.spans;
  }

  pan(right: number, down: number): void {
    const by = (right / this.width) * (this.to - this.from);
    this.from -= by;
    this.to -= by;
    this.scrollBy(-down);
  }

  scrollBy(pixels: number): void {
    this.scroll = Math.max(0, Math.min(this.high - this.drawing.height + 8, this.scroll + pixels));
    this.drawing.draw();
  }

  /** The height of all lanes. */
  private get high(): number {
    const last = this.tracks.at(-1);
    return last ? last.y + last.rows * ROW + TRACK_GAP : 100;
  }

  stretch(from: number, to: number): void {
    this.range = [this.timeAt(Math.min(from, to)), this.timeAt(Math.max(from, to))];
    this.drawing.draw();
  }

  private timeAt(x: number): number {
    return this.from + ((Math.max(x, LABEL) - LABEL) / this.width) * (this.to - this.from);
  }

  /** Lists what took the time in the selected range, or on the screen, once the picture rests. */
  private listSums(): void {
    clearTimeout(this.waiting);
    const list = () => {
      const [from, to] = this.range ?? [this.from, this.to];
      const what = this.range ? `In the selected ${formatSeconds(to - from)}` : "On the screen";
      this.sums.replaceChildren(tabulateSums(what, sumUp(this.tracks, this.spans, from, to)));
    };
    if (this.sums.childElementCount) this.waiting = setTimeout(list, REST_MS);
    else list();
  }

  private get width(): number {
    return Math.max(1, this.drawing.width - LABEL);
  }

  private x(seconds: number): number {
    return LABEL + ((seconds - this.from) / (this.to - this.from)) * this.width;
  }

  zoom(factor: number, x: number): void {
    const at = this.from + ((x - LABEL) / this.width) * (this.to - this.from);
    this.from = at + (this.from - at) / factor;
    this.to = Math.max(at + (this.to - at) / factor, this.from + 1e-8);
    this.drawing.draw();
  }

  private show(from: number, to: number): void {
    this.range = null;
    const margin = (to - from) * 0.02 || 1e-6;
    this.from = from - margin;
    this.to = to + margin;
  }

  private showAll(): void {
    this.show(...rangeOf(this.spans.rows, (row) => this.times(row)));
  }

  private showStep(): void {
    const { steps } = this.context.model.payload.tables;
    const { step } = this.context.store.state;
    const start = steps.number("start", step);
    const ofStep: number[] = [];
    for (let row = 0; row < this.spans.rows; row++)
      if (this.spans.number("step", row) === step) ofStep.push(row);
    if (ofStep.length)
      this.show(...rangeOfStep(this.spans, steps.number("number", step), ofStep, (row) => this.times(row)));
    else if (!Number.isNaN(start)) this.show(start, start + (steps.number("duration", step) || 1e-3));
    else this.showAll();
  }

  private showSelection(): void {
    const chosen: number[] = [];
    for (let row = 0; row < this.spans.rows; row++) if (this.isSelected(row)) chosen.push(row);
    if (!chosen.length) return;
    this.show(...rangeOf(chosen.length, (at) => this.times(chosen[at])));
    this.drawing.draw();
  }

  private times(row: number): [number, number] {
    const start = this.spans.number("start", row);
    return [start, start + (this.spans.number("duration", row) || 0)];
  }

  private isSelected(row: number): boolean {
    const { module, node } = this.context.store.state;
    if (node >= 0 && this.spans.link("node", row) === node) return true;
    return module >= 0 && this.context.model.sameModules(module).includes(this.spans.link("module", row));
  }

  update(): void {
    const { step } = this.context.store.state;
    if (step !== this.followed) this.showStep();
    this.followed = step;
    this.drawing.draw();
  }

  paint(painter: Painter, width: number, height: number): void {
    const theme = readTheme();
    if (!this.tracks.length) {
      painter.text(
        "This recording has no times: record with backward times or ops to see a timeline.",
        20,
        40,
        { color: theme.dim },
      );
      return;
    }
    painter.clip(LABEL, TOP, width - LABEL, height - TOP, () => {
      for (const track of this.tracks) this.paintTrack(painter, track, width, height);
    });
    painter.clip(0, TOP, LABEL, height - TOP, () => {
      for (const { label, y } of this.tracks)
        painter.text(shorten(label, 20), 10, y - this.scroll + 13, { color: theme.dim });
    });
    if (this.range) this.paintRange(painter, this.range, height);
    this.listSums();
    const origin =
      this.context.model.payload.tables.steps.number("start", this.context.store.state.step) || 0;
    drawAxis(
      painter,
      { x: LABEL, y: 0, width: width - LABEL, height: TOP },
      this.from - origin,
      this.to - origin,
      formatSeconds,
    );
  }

  private paintRange(painter: Painter, [from, to]: [number, number], height: number): void {
    const { accent } = readTheme();
    const [left, right] = [this.x(from), this.x(to)];
    painter.clip(LABEL, 0, this.width, height, () => {
      painter.rect(left, TOP, right - left, 4, accent);
      for (const x of [left, right]) painter.line([x, TOP, x, height], { color: accent, dash: [4, 3] });
    });
  }

  private paintTrack(painter: Painter, track: Track, width: number, height: number): void {
    const theme = readTheme();
    const { overlay } = this.context;
    const top = track.y - this.scroll;
    painter.line([0, top - TRACK_GAP / 2, width, top - TRACK_GAP / 2], { color: theme.line });
    const later: (() => void)[] = [];
    track.spans.forEach((spans, depth) => {
      const y = top + depth * ROW;
      if (y > height || y + ROW < TOP) return;
      let drawnTo = -Infinity;
      for (let at = firstAfter(spans, (row) => this.times(row)[1], this.from); at < spans.length; at++) {
        const row = spans[at];
        const [start, end] = this.times(row);
        if (start > this.to) break;
        const x = this.x(start);
        const wide = this.x(end) - x;
        const isSelected = this.isSelected(row);
        if (x + wide < drawnTo + THIN && !isSelected) continue;
        const left = Math.max(x, LABEL - 2);
        const size = Math.max(THIN, Math.min(x + wide, width + 2) - left);
        const value = overlay ? this.value(row, overlay.drawn) : NaN;
        const fill = overlay && !Number.isNaN(value) ? overlay.color(value) : theme.box;
        painter.rect(
          left,
          y,
          Math.max(size - 0.5, 0.5),
          ROW - 1,
          fill,
          size > 4 && fill === theme.box ? { color: theme.line } : undefined,
        );
        const measuring = ((this.spans.number("measuring", row) || 0) / (this.to - this.from)) * this.width;
        if (measuring > 1.5) {
          const begin = Math.max(left, x + wide - measuring);
          const width = left + size - begin - 1;
          if (width > 1)
            painter.rect(begin, y + 0.5, width, ROW - 2, theme.background, {
              color: theme.dim,
              dash: [2, 2],
            });
        }
        if (size - measuring > 22) {
          const color = fill === theme.box ? theme.text : textOn(fill);
          painter.text(
            fitLabel(this.labelOf(row), Math.floor((size - measuring - 6) / 7.2)),
            left + 4,
            y + 13,
            {
              color,
              size: 11,
            },
          );
        }
        if (isSelected)
          later.push(() => {
            painter.rect(left, y, Math.max(size - 0.5, 2), ROW - 1, null, {
              color: theme.accent,
              width: 2.5,
            });
          });
        drawnTo = left + size;
      }
    });
    for (const each of later) each();
  }

  /** What a span is called in it: an op without its namespace and overload. */
  private labelOf(row: number): string {
    const label = this.spans.text("label", row);
    const parts = label.split(".");
    return this.spans.text("kind", row) === "op" && parts.length === 3 ? parts[1] : label;
  }

  private value(row: number, { nodes, modules }: Values): number {
    const node = this.spans.link("node", row);
    if (node >= 0 && !Number.isNaN(nodes[node])) return nodes[node];
    const module = this.spans.link("module", row);
    return module >= 0 ? modules[module] : NaN;
  }

  private spanAt(x: number, y: number): number {
    const track = this.tracks.find(
      (each) => y + this.scroll >= each.y && y + this.scroll < each.y + each.rows * ROW,
    );
    if (!track || x < LABEL) return -1;
    const spans = track.spans[Math.floor((y + this.scroll - track.y) / ROW)] ?? [];
    const time = this.from + ((x - LABEL) / this.width) * (this.to - this.from);
    const slack = (2 * (this.to - this.from)) / this.width;
    const at = firstAfter(spans, (row) => this.times(row)[1], time - slack);
    return at < spans.length && this.times(spans[at])[0] <= time + slack ? spans[at] : -1;
  }

  pick(x: number, y: number): void {
    const row = this.spanAt(x, y);
    this.range = null;
    if (row >= 0) this.choose(row);
    this.drawing.draw();
  }

  private choose(row: number): void {
    const node = this.spans.link("node", row);
    const module = this.spans.link("module", row);
    const step = this.spans.link("step", row);
    if (step >= 0) this.followed = step; // what is on the screen stays there
    this.context.select({
      node,
      module: module >= 0 || node < 0 ? module : this.context.model.moduleOfNode(node),
      site: -1,
      ...(step >= 0 ? { step } : {}),
    });
  }

  describe(x: number, y: number): string {
    const row = this.spanAt(x, y);
    if (row < 0) return "";
    const module = this.spans.link("module", row);
    const path = module >= 0 ? `\n${shorten(this.context.model.modulePath(module), 200)}` : "";
    const [start, end] = this.times(row);
    const measuring = this.spans.number("measuring", row) || 0;
    const note = measuring ? `, ${formatSeconds(measuring)} of it measuring by modtrace` : "";
    return `${shorten(this.spans.text("label", row), 200)}  ${formatSeconds(end - start)}${note}${path}`;
  }

  onKey(event: KeyboardEvent): boolean {
    const middle = LABEL + this.width / 2;
    if (event.key === " ") this.showStep();
    else if (event.key === "+" || event.key === "=") this.zoom(1.4, middle);
    else if (event.key === "-") this.zoom(1 / 1.4, middle);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight")
      this.stepAlong(event.key === "ArrowRight" ? 1 : -1);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown")
      this.scrollBy(event.key === "ArrowDown" ? ROW : -ROW);
    else return false;
    this.drawing.draw();
    return true;
  }

  /** Selects the next span of the same depth, or the first one. */
  private stepAlong(by: number): void {
    for (const track of this.tracks)
      for (const spans of track.spans) {
        const at = spans.findIndex((row) => this.isSelected(row) && this.times(row)[1] >= this.from);
        if (at >= 0 && spans[at + by] !== undefined) {
          this.choose(spans[at + by]);
          return;
        }
      }
    const all = this.tracks.flatMap(({ spans }) => spans[0] ?? []);
    const first = all.find((row) => this.spans.link("module", row) >= 0 && this.times(row)[1] >= this.from);
    if (first !== undefined) this.choose(first);
  }

  /** All lanes, over the time that is on the screen. */
  picture(): Picture {
    const { width } = this.drawing;
    const height = this.high + 8;
    const paint = (painter: Painter) => {
      const { scroll } = this;
      this.scroll = 0;
      this.paint(painter, width, height);
      this.scroll = scroll;
    };
    return { width, height, paint };
  }

  table(): TextTable {
    const body: string[][] = [];
    for (const track of this.tracks)
      track.spans.forEach((spans, depth) => {
        for (const row of spans) {
          const [start, end] = this.times(row);
          if (end < this.from || start > this.to || body.length > 2000) continue;
          body.push([
            track.label,
            String(depth),
            this.spans.text("label", row),
            formatSeconds(start),
            formatSeconds(end - start),
          ]);
        }
      });
    return {
      caption: "Timeline: what is on the screen",
      head: ["lane", "depth", "what", "start", "duration"],
      body,
    };
  }
}
