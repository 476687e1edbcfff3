/** Axes and lines of charts. */

import { findRange, NONFINITE, type Scale } from "../colors";
import { formatNumber, formatTick, shorten } from "../format";
import type { Area, Painter } from "../painter";
import { readTheme } from "../theme";

/** The room on the left of a chart for names, and the height of a chart. */
export const LEFT = 260;
export const CHART = 170;

export interface Series {
  label: string;
  color: string;
  values: readonly number[];
  /** Positions with a dashed line of their own, which the line through the others passes over. */
  isDashed: (at: number) => boolean;
}

/** Round numbers between two values, about as many as are asked for. */
export function ticks(low: number, high: number, wanted: number): number[] {
  const range = high - low;
  if (!(range > 0) || !Number.isFinite(range)) return [low];
  const rough = range / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? power * 10;
  const found: number[] = [];
  for (let at = Math.ceil(low / step); at * step <= high && found.length < 50; at++) found.push(at * step);
  return found;
}

/** Draws an axis along the top of a picture. */
export function drawAxis(
  painter: Painter,
  area: Area,
  low: number,
  high: number,
  format: (value: number) => string,
): void {
  const theme = readTheme();
  const { x, y, width, height } = area;
  painter.line([x, y + height - 0.5, x + width, y + height - 0.5], { color: theme.line });
  for (const tick of ticks(low, high, width / 110)) {
    const at = x + ((tick - low) / (high - low)) * width;
    painter.line([at, y + height - 5, at, y + height], { color: theme.dim });
    if (at > x + 16 && at < x + width - 24)
      painter.text(format(tick), at, y + height - 8, { color: theme.dim, size: 11, align: "center" });
  }
}

/** Draws the colours of a scale with an axis below them, and what is not finite beside them. */
export function drawScale(
  painter: Painter,
  x: number,
  y: number,
  width: number,
  scale: Scale,
  text: (value: number) => string = formatTick,
): void {
  const theme = readTheme();
  const label = { color: theme.dim, size: 11 };
  const bar = Math.max(60, width - 90);
  const cells = Array.from({ length: 64 }, (_, at) => scale.color(scale.at(at / 63)));
  painter.cells(x, y, bar, 9, [cells]);
  const isLog = scale.kind === "log";
  const [low, high] = isLog ? [Math.log10(scale.low), Math.log10(scale.high)] : [scale.low, scale.high];
  const places = scale.high > scale.low ? ticks(low, high, bar / 60) : [low];
  for (const tick of places.length > 1 || !isLog ? places : [low, high]) {
    const value = isLog ? 10 ** tick : tick;
    const at = x + scale.place(value) * bar;
    painter.line([at, y + 9, at, y + 12], { color: theme.dim });
    painter.text(text(isLog ? Number(value.toPrecision(2)) : value), at, y + 23, {
      ...label,
      align: "center",
    });
  }
  painter.rect(x + bar + 10, y, 9, 9, NONFINITE);
  painter.text("not finite", x + bar + 23, y + 9, label);
  if (isLog) painter.text("log scale", x - 8, y + 9, { ...label, align: "right" });
}

/** A chart of lines that is drawn, and answers what is at a point. */
export interface Chart {
  /** Says the position and the value of the nearest point; empty outside of the chart. */
  describe(x: number, y: number): string;
}

/** Draws lines with their title, names and values at `marked` on the left. */
export function drawChart(
  painter: Painter,
  top: number,
  width: number,
  title: string,
  series: readonly Series[],
  name: (at: number) => string,
  marked: number,
): Chart {
  const theme = readTheme();
  painter.text(shorten(title, 26), 12, top + 22, { color: theme.text, bold: true });
  series.forEach(({ label, color, values }, at) => {
    const level = top + 42 + at * 15;
    painter.rect(12, level - 9, 9, 9, color);
    const value = marked < 0 ? "" : valueText(values[marked]);
    painter.text(shorten(label, value ? 21 : 28), 26, level, { color: theme.text, size: 11 });
    painter.text(value, LEFT - 62, level, { color: theme.dim, size: 11, align: "right" });
  });
  return drawLines(painter, { x: LEFT, y: top + 12, width, height: CHART - 44 }, series, name, marked);
}

/** Writes a value of a line; infinity stands for all that is not finite. */
export function valueText(value: number): string {
  return value === Infinity ? "not finite" : formatNumber(value);
}

/** Draws lines over positions 0, 1, 2 ... with an axis on the left. What is not finite is a mark at the bottom. */
function drawLines(
  painter: Painter,
  area: Area,
  series: readonly Series[],
  labelOf: (at: number) => string,
  marked: number,
): Chart {
  const theme = readTheme();
  const { x, y, width, height } = area;
  const range = findRange(...series.map(({ values }) => values));
  const isLog = range.low > 0 && range.high / range.low > 200;
  const convert = isLog ? Math.log10 : (value: number) => value;
  const [least, most] = [convert(range.low), convert(range.high)];
  const margin = most > least ? (most - least) * 0.05 : 0.5;
  const [low, high] = [least - margin, most + margin];
  const count = Math.max(1, ...series.map(({ values }) => values.length));
  const at = (index: number) => x + (index / Math.max(1, count - 1)) * width;
  const level = (converted: number) => y + height - ((converted - low) / (high - low)) * height;
  const up = (value: number) => (Number.isFinite(value) ? level(convert(value)) : y + height);
  const tickText = { color: theme.dim, size: 11 };
  for (const tick of ticks(low, high, height / 34)) {
    painter.line([x, level(tick), x + width, level(tick)], { color: theme.line });
    painter.text(formatTick(isLog ? 10 ** tick : tick), x - 6, level(tick) + 4, {
      ...tickText,
      align: "right",
    });
  }
  for (const index of ticks(0, count - 1, width / 90))
    if (Number.isInteger(index))
      painter.text(labelOf(index), at(index), y + height + 14, { ...tickText, align: "center" });
  for (const each of series)
    for (const isDashed of [false, true]) drawSeries(painter, each, isDashed, at, up, y + height);
  if (marked >= 0) painter.line([at(marked), y, at(marked), y + height], { color: theme.text, dash: [3, 3] });
  return {
    describe: (pointX, pointY) => {
      if (pointX < x - 8 || pointX > x + width + 8 || pointY < y || pointY > y + height) return "";
      const index = Math.round(((pointX - x) / width) * (count - 1));
      const position = Math.max(0, Math.min(count - 1, index));
      const nearest = findNearest(series, position, (value) => Math.abs(up(value) - pointY));
      return nearest && `step ${labelOf(position)}\n${nearest.label}: ${valueText(nearest.values[position])}`;
    },
  };
}

/** The line with a value at a position that is least far away; none if no line has a value there. */
function findNearest(
  series: readonly Series[],
  position: number,
  distance: (value: number) => number,
): Series | "" {
  const away = ({ values }: Series) => distance(values[position]);
  const there = series.filter(({ values }) => !Number.isNaN(values[position] ?? NaN));
  return there.sort((one, other) => away(one) - away(other))[0] ?? "";
}

function drawSeries(
  painter: Painter,
  { values, color, isDashed: isDashedAt }: Series,
  isDashed: boolean,
  x: (at: number) => number,
  y: (value: number) => number,
  bottom: number,
): void {
  const theme = readTheme();
  let points: number[] = [];
  const end = () => {
    if (points.length > 2) painter.line(points, { color, width: 1.6, ...(isDashed ? { dash: [2, 3] } : {}) });
    else if (points.length === 2) painter.rect(points[0] - 2, points[1] - 2, 4, 4, color);
    points = [];
  };
  values.forEach((value, at) => {
    if (isDashedAt(at) !== isDashed) return;
    if (Number.isFinite(value)) points.push(x(at), y(value));
    else {
      end();
      if (value === Infinity || value === -Infinity) painter.rect(x(at) - 1.5, bottom - 6, 3, 6, theme.bad);
    }
  });
  end();
}
