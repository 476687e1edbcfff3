/** A canvas that fills its box, with what a pointer does there. */

import { h } from "../dom";
import { CanvasPainter, type Painter } from "../painter";
import type { Picture } from "../context";

/** What draws on the canvas, and what answers the pointer. */
export interface Drawn {
  paint(painter: Painter, width: number, height: number): void;
  /** Says what is at a point; empty for nothing. */
  describe(x: number, y: number): string;
  pick(x: number, y: number): void;
  pan?(right: number, down: number): void;
  /** `factor` is greater than 1 to come closer; the point stays where it is. */
  zoom?(factor: number, x: number, y: number): void;
  /** Follows the wheel while shift is held. */
  scrollBy?(pixels: number): void;
  /** Follows a drag while shift is held, from where it began to where it is. */
  stretch?(from: number, to: number): void;
}

/** The pointer has moved the picture, and not clicked, if it has gone further than this. */
const CLICK = 3;
const TIP_WIDTH = 280;

export class Drawing {
  readonly canvas: HTMLCanvasElement;
  readonly element = h("div", { class: "canvasbox" });
  private readonly tip = h("div", { class: "tip" });
  /** Where the pointer was last; `start` is where a drag with shift held began. */
  private drag: { x: number; y: number; moved: boolean; start: number } | null = null;

  constructor(
    label: string,
    private readonly drawn: Drawn,
  ) {
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.tip.hidden = true;
    this.element.append(this.canvas, this.tip);
    this.listen();
    new ResizeObserver(() => {
      this.draw();
    }).observe(this.element);
  }

  get width(): number {
    return this.element.clientWidth;
  }

  get height(): number {
    return this.element.clientHeight;
  }

  draw(): void {
    const { width, height } = this;
    if (width && height)
      this.drawn.paint(new CanvasPainter(fitCanvas(this.canvas, width, height)), width, height);
  }

  picture(): Picture {
    const { width, height } = this;
    return { width, height, paint: (painter) => { this.drawn.paint(painter, width, height); } }; // prettier-ignore
  }

  private listen(): void {
    const { canvas, drawn } = this;
    canvas.addEventListener("pointerdown", ({ offsetX: x, offsetY: y, pointerId, shiftKey }) => {
      this.drag = { x, y, moved: false, start: shiftKey && drawn.stretch ? x : NaN };
      canvas.setPointerCapture(pointerId);
    });
    canvas.addEventListener("pointermove", ({ offsetX: x, offsetY: y }) => {
      if (this.drag) this.move(this.drag, x, y);
      else this.hover(x, y);
    });
    canvas.addEventListener("pointerup", ({ offsetX: x, offsetY: y }) => {
      canvas.focus({ preventScroll: true });
      if (this.drag && !this.drag.moved) drawn.pick(x, y);
    });
    canvas.addEventListener("lostpointercapture", () => (this.drag = null));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    if (drawn.zoom)
      canvas.addEventListener("wheel", (event) => { this.turn(event); }, { passive: false }); // prettier-ignore
  }

  private move(drag: NonNullable<typeof this.drag>, x: number, y: number): void {
    if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) <= CLICK) return;
    if (Number.isNaN(drag.start)) this.drawn.pan?.(x - drag.x, y - drag.y);
    else this.drawn.stretch?.(drag.start, x);
    this.drag = { ...drag, x, y, moved: true };
  }

  /** With shift held, browsers tell of the wheel as if it turned sideways. */
  private turn(event: WheelEvent): void {
    event.preventDefault();
    const by = event.deltaY || event.deltaX;
    if (event.shiftKey) this.drawn.scrollBy?.(by);
    else this.drawn.zoom?.(Math.exp(-Math.max(-80, Math.min(80, by)) * 0.004), event.offsetX, event.offsetY);
  }

  private hover(x: number, y: number): void {
    this.tip.textContent = this.drawn.describe(x, y);
    this.tip.hidden = !this.tip.textContent;
    this.tip.style.left = `${Math.min(x + 14, this.width - TIP_WIDTH)}px`;
    this.tip.style.top = `${Math.min(y + 16, this.height - 60)}px`;
  }
}

/** Fits a canvas to its size on the page and to the density of the screen. */
export function fitCanvas(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D {
  const density = window.devicePixelRatio || 1;
  const [wide, high] = [Math.max(1, Math.round(width * density)), Math.max(1, Math.round(height * density))];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
