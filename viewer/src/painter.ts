/** Draws on a canvas or into an SVG by the same few calls. */

export type Align = "left" | "center" | "right";

export interface TextStyle {
  color: string;
  size?: number;
  align?: Align;
  bold?: boolean;
}

export interface Stroke {
  color: string;
  width?: number;
  dash?: readonly number[];
}

export interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Painter {
  rect(
    x: number,
    y: number,
    width: number,
    height: number,
    fill: string | null,
    stroke?: Stroke,
    radius?: number,
  ): void;
  /** Points are x and y in turn. */
  line(points: ArrayLike<number>, stroke: Stroke, radius?: number): void;
  polygon(points: ArrayLike<number>, fill: string): void;
  text(text: string, x: number, y: number, style: TextStyle): void;
  clip(x: number, y: number, width: number, height: number, paint: () => void): void;
  /** Fills an area with rows of cells; null is left empty. */
  cells(
    x: number,
    y: number,
    width: number,
    height: number,
    colors: readonly (readonly (string | null)[])[],
  ): void;
}

export const FONT =
  'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", "Liberation Sans", sans-serif';

export class CanvasPainter implements Painter {
  constructor(private readonly canvas: CanvasRenderingContext2D) {}

  rect(
    x: number,
    y: number,
    width: number,
    height: number,
    fill: string | null,
    stroke?: Stroke,
    radius = 0,
  ): void {
    const { canvas } = this;
    if (!radius && fill && !stroke) {
      canvas.fillStyle = fill;
      canvas.fillRect(x, y, width, height);
      return;
    }
    canvas.beginPath();
    if (radius) canvas.roundRect(x, y, width, height, radius);
    else canvas.rect(x, y, width, height);
    if (fill) {
      canvas.fillStyle = fill;
      canvas.fill();
    }
    if (stroke) this.stroke(stroke);
  }

  line(points: ArrayLike<number>, stroke: Stroke, radius = 0): void {
    const { canvas } = this;
    canvas.beginPath();
    canvas.moveTo(points[0], points[1]);
    const last = points.length - 2;
    for (let at = 2; at < last; at += 2) {
      if (radius) canvas.arcTo(points[at], points[at + 1], points[at + 2], points[at + 3], radius);
      else canvas.lineTo(points[at], points[at + 1]);
    }
    canvas.lineTo(points[last], points[last + 1]);
    this.stroke(stroke);
  }

  private stroke({ color, width = 1, dash }: Stroke): void {
    const { canvas } = this;
    canvas.strokeStyle = color;
    canvas.lineWidth = width;
    if (dash) canvas.setLineDash(dash as number[]);
    canvas.stroke();
    if (dash) canvas.setLineDash([]);
  }

  polygon(points: ArrayLike<number>, fill: string): void {
    const { canvas } = this;
    canvas.beginPath();
    canvas.moveTo(points[0], points[1]);
    for (let at = 2; at < points.length; at += 2) canvas.lineTo(points[at], points[at + 1]);
    canvas.fillStyle = fill;
    canvas.fill();
  }

  text(
    text: string,
    x: number,
    y: number,
    { color, size = 12, align = "left", bold = false }: TextStyle,
  ): void {
    const { canvas } = this;
    const font = `${bold ? "600 " : ""}${size}px ${FONT}`;
    if (canvas.font !== font) canvas.font = font;
    canvas.textAlign = align;
    canvas.fillStyle = color;
    canvas.fillText(text, x, y);
  }

  clip(x: number, y: number, width: number, height: number, paint: () => void): void {
    this.canvas.save();
    this.canvas.beginPath();
    this.canvas.rect(x, y, width, height);
    this.canvas.clip();
    paint();
    this.canvas.restore();
  }

  cells(
    x: number,
    y: number,
    width: number,
    height: number,
    colors: readonly (readonly (string | null)[])[],
  ): void {
    const columns = colors[0]?.length ?? 0;
    if (!columns) return;
    const image = new ImageData(columns, colors.length);
    const pixels = new Uint32Array(image.data.buffer);
    colors.forEach((row, at) => {
      row.forEach((color, column) => {
        if (color) pixels[at * columns + column] = toPixel(color);
      });
    });
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = colors.length;
    small.getContext("2d")!.putImageData(image, 0, 0);
    this.canvas.imageSmoothingEnabled = false;
    this.canvas.drawImage(small, x, y, width, height);
  }
}

/** A colour as the four bytes of a pixel. */
function toPixel(color: string): number {
  const value = parseInt(color.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

const SVG = "http://www.w3.org/2000/svg";
const ANCHORS: Record<Align, string> = { left: "start", center: "middle", right: "end" };

export class SvgPainter implements Painter {
  readonly root = document.createElementNS(SVG, "svg");
  private group: Element = this.root;
  private clips = 0;

  constructor(width: number, height: number) {
    set(this.root, { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT });
  }

  rect(
    x: number,
    y: number,
    width: number,
    height: number,
    fill: string | null,
    stroke?: Stroke,
    radius = 0,
  ): void {
    this.add("rect", { x, y, width, height, rx: radius || null, fill: fill ?? "none", ...strokeOf(stroke) });
  }

  line(points: ArrayLike<number>, stroke: Stroke): void {
    this.add("polyline", { points: Array.from(points, round).join(" "), fill: "none", ...strokeOf(stroke) });
  }

  polygon(points: ArrayLike<number>, fill: string): void {
    this.add("polygon", { points: Array.from(points, round).join(" "), fill });
  }

  text(
    text: string,
    x: number,
    y: number,
    { color, size = 12, align = "left", bold = false }: TextStyle,
  ): void {
    const weight = bold ? 600 : null;
    const attributes = {
      x,
      y,
      fill: color,
      "font-size": size,
      "text-anchor": ANCHORS[align],
      "font-weight": weight,
    };
    // Characters that XML does not allow would make the whole file unreadable.
    this.add("text", attributes).textContent = text.replaceAll(
      /[^\t\n\r\x20-\uFFFD]|[\uD800-\uDFFF]/g,
      "\uFFFD",
    );
  }

  clip(x: number, y: number, width: number, height: number, paint: () => void): void {
    const outer = this.group;
    const id = `clip${this.clips++}`;
    const clip = this.add("clipPath", { id });
    this.group = clip;
    this.add("rect", { x, y, width, height });
    this.group = outer;
    this.group = this.add("g", { "clip-path": `url(#${id})` });
    paint();
    this.group = outer;
  }

  cells(
    x: number,
    y: number,
    width: number,
    height: number,
    colors: readonly (readonly (string | null)[])[],
  ): void {
    const high = height / colors.length;
    colors.forEach((row, at) => {
      const wide = width / row.length;
      for (let column = 0; column < row.length;) {
        let next = column + 1;
        while (next < row.length && row[next] === row[column]) next += 1;
        if (row[column])
          this.rect(x + column * wide, y + at * high, (next - column) * wide, high, row[column]);
        column = next;
      }
    });
  }

  private add(name: string, attributes: Record<string, string | number | null>): Element {
    const element = document.createElementNS(SVG, name);
    set(element, attributes);
    this.group.append(element);
    return element;
  }

  toString(): string {
    return new XMLSerializer().serializeToString(this.root);
  }
}

function strokeOf(stroke?: Stroke): Record<string, string | number | null> {
  if (!stroke) return {};
  return {
    stroke: stroke.color,
    "stroke-width": stroke.width ?? 1,
    "stroke-dasharray": stroke.dash?.join(" ") ?? null,
  };
}

function set(element: Element, attributes: Record<string, string | number | null>): void {
  for (const [name, value] of Object.entries(attributes))
    if (value !== null) element.setAttribute(name, typeof value === "number" ? String(round(value)) : value);
}

function round(value: number): number {
  return Math.round(value * 100) / 100;
}
