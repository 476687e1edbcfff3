/** The whole graph in a corner, stretched to fit, with the part on the screen, the selection and what a search found. */

import { h } from "../dom";
import { CanvasPainter } from "../painter";
import { fitCanvas } from "../views/canvas";
import type { Camera, Scene } from "./paint";

const WIDTH = 120;
const HEIGHT = 180;

export class Minimap {
  readonly element = h("canvas", { class: "minimap", role: "img", "aria-label": "Overview of the graph" });
  private readonly ground = document.createElement("canvas");
  private drawnFor: unknown[] = [];

  /** `show` is called with a point of the graph that is to come into the middle. */
  constructor(show: (x: number, y: number) => void) {
    const go = (event: PointerEvent) => {
      if (event.buttons)
        show((event.offsetX / WIDTH) * this.size[0], (event.offsetY / HEIGHT) * this.size[1]);
    };
    this.element.addEventListener("pointerdown", go);
    this.element.addEventListener("pointermove", go);
  }

  private size: [number, number] = [1, 1];

  forget(): void {
    this.drawnFor = [];
  }

  draw(scene: Scene, camera: Camera, width: number, height: number): void {
    const { layout, theme } = scene;
    this.size = [layout.wide, layout.high];
    const wanted = [scene.overlay, theme.background, layout.wide, layout.high];
    if (!wanted.every((each, at) => each === this.drawnFor[at])) {
      this.drawnFor = wanted;
      this.drawGround(scene);
    }
    const context = fitCanvas(this.element, WIDTH, HEIGHT);
    context.drawImage(this.ground, 0, 0, WIDTH, HEIGHT);
    const painter = new CanvasPainter(context);
    const [across, down] = [WIDTH / layout.wide, HEIGHT / layout.high];
    const mark = (node: number, color: string, size: number) => {
      const [x, y] = layout.position(node);
      painter.rect(
        x * across - 1,
        y * down - 1,
        Math.max(size, layout.width[node] * across),
        Math.max(size, layout.height[node] * down),
        null,
        { color, width: 2 },
      );
    };
    for (const node of [...scene.hits].slice(0, 500)) if (node >= 0) mark(node, "#e69f00", 4);
    if (scene.selected >= 0) mark(scene.selected, theme.accent, 4);
    const [x, y] = [(-camera.x / camera.zoom) * across, (-camera.y / camera.zoom) * down];
    painter.rect(x, y, (width / camera.zoom) * across, (height / camera.zoom) * down, null, {
      color: theme.text,
      width: 1.5,
    });
  }

  /** Draws what is large enough to be seen, once for each layout. */
  private drawGround({ layout, overlay, drawn, theme }: Scene): void {
    const painter = new CanvasPainter(fitCanvas(this.ground, WIDTH, HEIGHT));
    painter.rect(0, 0, WIDTH, HEIGHT, theme.panel);
    const [across, down] = [WIDTH / layout.wide, HEIGHT / layout.high];
    const waiting: [number, number, number][] = [[-1, 0, 0]];
    while (waiting.length) {
      const [owner, left, top] = waiting.pop()!;
      for (const node of layout.levels.level(owner).items) {
        if (owner < 0 && !layout.isShown(node)) continue;
        const [x, y] = [left + layout.x[node], top + layout.y[node]];
        const [wide, high] = [layout.width[node] * across, layout.height[node] * down];
        const isOpen = layout.isOpen(node) && high > 3;
        const value = isOpen ? NaN : drawn(node);
        const fill = Number.isNaN(value) ? theme.box : overlay!.color(value);
        painter.rect(
          x * across,
          y * down,
          wide,
          Math.max(high, 0.5),
          fill,
          isOpen && high > 6 ? { color: theme.line, width: 0.5 } : undefined,
        );
        if (isOpen) waiting.push([node, x, y]);
      }
    }
  }
}
