/** Draws the graph: what is too small to see is drawn as the group that it is in. */

import { badgeOfNode } from "../badges";
import { findRange, NONFINITE, textOn } from "../colors";
import { verdictColor, verdictSign } from "../difference";
import type { Model } from "../model";
import type { Overlay } from "../overlay";
import type { Area, Painter } from "../painter";
import type { Theme } from "../theme";
import { nameTogether, shorten } from "../format";
import { CROWD, type GraphLayout, type Positions, ROW_GAP } from "./layout";
import type { Level } from "./levels";
import { route } from "./route";

/** Nodes below this size on the screen are drawn as their group. */
const SMALLEST = 2;
/** Texts below this size are not drawn. */
const SMALLEST_TEXT = 6.5;
const STRIP = 24;

export interface Camera {
  x: number;
  y: number;
  zoom: number;
}

export interface Scene {
  model: Model;
  layout: GraphLayout;
  at: Positions;
  overlay: Overlay | null;
  hasBadges: boolean;
  /** The values of the overlay; NaN for none. */
  value: (node: number) => number;
  /** The values as colours show them. */
  drawn: (node: number) => number;
  selected: number;
  related: ReadonlySet<number>;
  hits: ReadonlySet<number>;
  theme: Theme;
}

interface Place {
  node: number;
  x: number;
  y: number;
}

export class GraphPainter {
  private readonly strips = new Map<number, (string | null)[]>();
  private stripsOf: Overlay | null = null;
  private stripsIn: Theme | null = null;
  /** Where each node was drawn last, for lines to those that a level does not hold together. */
  readonly drawn = new Map<number, Area>();

  paint(painter: Painter, scene: Scene, camera: Camera, width: number, height: number): void {
    if (this.stripsOf !== scene.overlay || this.stripsIn !== scene.theme) this.strips.clear();
    this.stripsOf = scene.overlay;
    this.stripsIn = scene.theme;
    this.drawn.clear();
    const root = scene.layout.levels.level(-1);
    const view = { width, height };
    const waiting: Place[] = [];
    this.paintLevel(painter, scene, root, camera, { node: -1, x: camera.x, y: camera.y }, view, waiting);
    while (waiting.length) {
      const place = waiting.pop()!;
      this.paintLevel(painter, scene, scene.layout.levels.level(place.node), camera, place, view, waiting);
    }
  }

  /** Draws the lines and the items of one level, and notes the open groups in it. */
  private paintLevel(
    painter: Painter,
    scene: Scene,
    level: Level,
    { zoom }: Camera,
    origin: Place,
    view: { width: number; height: number },
    waiting: Place[],
  ): void {
    const { layout, at } = scene;
    if (ROW_GAP * zoom >= SMALLEST) this.paintLines(painter, scene, level, zoom, origin, view);
    for (const node of level.items) {
      if (level.owner < 0 && !layout.isShown(node)) continue;
      const x = origin.x + at.x[node] * zoom;
      const y = origin.y + at.y[node] * zoom;
      const width = at.width[node] * zoom;
      const height = at.height[node] * zoom;
      if (y + height < 0 || y > view.height || x + width < 0 || x > view.width || height < SMALLEST) continue;
      const area = { x, y, width, height };
      this.drawn.set(node, area);
      const isOpen = layout.isOpen(node) && height > 3 * SMALLEST;
      if (isOpen) {
        this.paintGroup(painter, scene, node, area, zoom);
        waiting.push({ node, x, y });
      } else this.paintNode(painter, scene, node, area, zoom);
    }
  }

  private paintGroup(painter: Painter, scene: Scene, node: number, area: Area, zoom: number): void {
    const { theme, model } = scene;
    const { x, y, width, height } = area;
    const isRecomputed = model.phase(node) === "recompute";
    const radius = Math.min(8, 8 * zoom);
    painter.rect(
      x,
      y,
      width,
      height,
      model.graph.depth[node] % 2 ? theme.background : theme.panel,
      this.borderOf(scene, node, isRecomputed),
      radius,
    );
    this.paintMarks(painter, scene, node, area, zoom);
    const size = 12 * zoom;
    if (size < SMALLEST_TEXT) return;
    const value = this.valueText(scene, node);
    const name = `▾ ${this.title(scene, node)}`;
    const room = Math.floor(width / (size * 0.6)) - 2;
    painter.text(shorten(name, Math.max(8, room)), x + 8 * zoom, y + 16 * zoom, {
      color: theme.text,
      size,
      bold: true,
    });
    if (value && room - name.length > value.length + 2)
      painter.text(value, x + width - (badgeOfNode(model, node) ? 36 : 8) * zoom, y + 16 * zoom, {
        color: theme.dim,
        size: size * 0.92,
        align: "right",
      });
  }

  private paintNode(painter: Painter, scene: Scene, node: number, area: Area, zoom: number): void {
    const { theme, model, layout, overlay } = scene;
    const { x, y, width, height } = area;
    const drawn = scene.drawn(node);
    const isColored = overlay !== null && !Number.isNaN(drawn);
    const fill = isColored ? overlay.color(drawn) : theme.box;
    if (height < 4) {
      painter.rect(x, y, width, height, isColored ? fill : theme.line);
      return;
    }
    const isLeaf = layout.levels.isLeaf(node);
    const isRecomputed = model.phase(node) === "recompute";
    const radius = Math.min(isLeaf ? height / 2 : 6 * zoom, height / 2);
    const border = this.borderOf(scene, node, isRecomputed);
    if (this.standsForOthers(scene, node))
      painter.rect(x + 4 * zoom, y + 4 * zoom, width, height, theme.background, border, radius);
    painter.rect(x, y, width, height, isRecomputed && !isColored ? theme.background : fill, border, radius);
    this.paintStrip(painter, scene, node, area, zoom);
    this.paintMarks(painter, scene, node, area, zoom);
    const size = 12 * zoom;
    if (size < SMALLEST_TEXT) return;
    const color = isColored ? textOn(fill) : theme.text;
    const isGroup = model.graph.children(node).length > 0;
    const room = Math.max(3, Math.floor((width - 16 * zoom) / (size * 0.6)));
    painter.text(
      shorten((isGroup ? "▸ " : "") + this.title(scene, node), room),
      x + 8 * zoom,
      y + (isLeaf ? 15 : 16) * zoom,
      { color, size, bold: !isLeaf },
    );
    if (isLeaf) return;
    const what = model.nodeNote(node);
    const valueText = this.valueText(scene, node);
    const space = Math.floor(room * 1.2) - (valueText ? valueText.length + 3 : 0);
    const note = [space > 2 ? shorten(what, space) : "", valueText].filter(Boolean).join(" · ");
    painter.text(note, x + 8 * zoom, y + 31 * zoom, {
      color: isColored ? color : theme.dim,
      size: size * 0.88,
    });
  }

  /** Whether a node is drawn in place of its equal siblings; not merely because the group around it is. */
  private standsForOthers({ model, layout }: Scene, node: number): boolean {
    const { graph } = model;
    const count = (row: number) => graph.table.number("count", row);
    const outer = graph.parent[node];
    return count(node) > 1 && layout.isFolded(node) && !(outer >= 0 && count(outer) > 1);
  }

  private title(scene: Scene, node: number): string {
    const { model } = scene;
    const sign = verdictSign(model.difference("nodes", node));
    const names = (sign ? `${sign} ` : "") + model.bothNames(node);
    if (!this.standsForOthers(scene, node)) return names;
    const members = [node, ...model.foldedInto.get(node)].map((each) => model.nodeName(each));
    const { low, high } = findRange(members.map(Number));
    const isNumbered = members.every((name) => Number.isInteger(Number(name)));
    const run = (sign ? `${sign} ` : "") + (isNumbered ? `${low}..${high}` : nameTogether(members));
    return `${run}  ×${model.graph.table.number("count", node)}`;
  }

  private valueText({ overlay, value }: Scene, node: number): string {
    return overlay && !Number.isNaN(value(node)) ? overlay.text(value(node)) : "";
  }

  private borderOf(scene: Scene, node: number, isRecomputed: boolean) {
    const { theme, model, selected, related, hits } = scene;
    const verdict = model.difference("nodes", node);
    const isDashed = isRecomputed || verdict === "only in A";
    if (node === selected) return { color: theme.accent, width: 3 };
    if (related.has(node)) return { color: theme.accent, width: 1.8 };
    if (hits.has(node)) return { color: "#e69f00", width: 2.5 };
    const color = this.changeColor(scene, node);
    if (color) return { color, width: 2, dash: isDashed ? [5, 3] : undefined };
    return isDashed ? { color: theme.dim, dash: [4, 3] } : { color: theme.line };
  }

  /** The colour of what is changed, or is in one of two runs alone, while colours show that; else null. */
  private changeColor({ model, overlay }: Scene, node: number): string | null {
    const verdict = overlay?.isVerdict ? model.difference("nodes", node) : "";
    return verdictSign(verdict) || verdict === "changed inside" ? verdictColor(verdict) : null;
  }

  /** A red badge where values are not finite, here or inside: full where they came up, else an outline. */
  private paintMarks(painter: Painter, scene: Scene, node: number, area: Area, zoom: number): void {
    const badge = badgeOfNode(scene.model, node);
    if (!badge || !scene.hasBadges) return;
    const { x, y, width, height } = area;
    const size = Math.max(5, Math.min(24 * zoom, height, 24));
    const wide = size > 13 ? size * (0.5 + badge.text.length * 0.31) : size;
    const left = x + width - wide + size * 0.3;
    const outline = badge.isOrigin ? undefined : { color: NONFINITE, width: 1.5 };
    const fill = badge.isOrigin ? NONFINITE : scene.theme.background;
    painter.rect(left, y - size * 0.25, wide, size * 0.66, fill, outline, size * 0.3);
    if (size > 13)
      painter.text(badge.text, left + wide / 2, y + size * 0.25, {
        color: badge.isOrigin ? "#ffffff" : scene.theme.bad,
        size: size * 0.46,
        align: "center",
        bold: true,
      });
  }

  /** The values inside a closed group, in the order of execution, as a strip of colours. */
  private paintStrip(painter: Painter, scene: Scene, node: number, area: Area, zoom: number): void {
    const { x, y, width, height } = area;
    if (!scene.overlay || height < 14 || !scene.model.graph.children(node).length) return;
    let strip = this.strips.get(node);
    if (!strip) this.strips.set(node, (strip = this.makeStrip(scene, node)));
    const cell = (width - 12 * zoom) / strip.length;
    strip.forEach((color, at) => {
      if (color) painter.rect(x + 6 * zoom + at * cell, y + height - 4.5 * zoom, cell, 3 * zoom, color);
    });
  }

  private makeStrip({ model, overlay }: Scene, node: number): (string | null)[] {
    const { graph } = model;
    const inside: number[] = [];
    for (let at = graph.position[node] + 1; at < graph.end[node]; at++) {
      const each = graph.order[at];
      if (!graph.children(each).length && !Number.isNaN(overlay!.drawn.nodes[each]))
        inside.push(overlay!.drawn.nodes[each]);
    }
    return partition(inside, STRIP).map((part) => {
      const most = part.reduce((most, each) => Math.max(most, each));
      return overlay!.color(overlay!.isKinds && !overlay!.isVerdict ? part[0] : most);
    });
  }

  private paintLines(
    painter: Painter,
    scene: Scene,
    level: Level,
    zoom: number,
    origin: Place,
    view: { width: number; height: number },
  ): void {
    const { at, layout, theme, selected } = scene;
    const bands = layout.bands.get(level.owner);
    if (!bands) return;
    const isDense = level.from.length > 4000;
    for (let line = 0; line < level.from.length; line++) {
      const [from, to] = [level.from[line], level.to[line]];
      const isChosen =
        selected >= 0 &&
        ((from >= 0 && level.items[from] === selected) || (to >= 0 && level.items[to] === selected));
      const isCrowded =
        (from >= 0 && level.crowd[level.row[from]] > CROWD) ||
        (to >= 0 && level.crowd[level.row[to]] > CROWD);
      const points = isCrowded && !isChosen ? null : route(level, line, at, bands);
      if (!points) continue;
      let [low, high] = [Infinity, -Infinity];
      for (let each = 0; each < points.length; each += 2) {
        points[each] = origin.x + points[each] * zoom;
        points[each + 1] = origin.y + points[each + 1] * zoom;
        low = Math.min(low, points[each + 1]);
        high = Math.max(high, points[each + 1]);
      }
      if (high < 0 || low > view.height || (isDense && high - low < 4)) continue;
      const ends = [from, to].map((end) =>
        end < 0 ? "" : scene.model.difference("nodes", level.items[end]),
      );
      const alone = ends.find((verdict) => verdict.startsWith("only"));
      const ofRun = alone && scene.overlay?.isVerdict ? verdictColor(alone) : null;
      const color = isChosen ? theme.accent : (ofRun ?? theme.dim);
      const width = isChosen || ofRun ? 2 : Math.min(1.1, 0.4 + zoom * 0.7);
      painter.line(points, { color, width, dash: scene.model.hasOrder ? [3, 4] : undefined }, 6 * zoom);
      if (zoom > 0.35 && to >= 0) this.paintHead(painter, points, color, zoom);
    }
  }

  private paintHead(painter: Painter, points: number[], color: string, zoom: number): void {
    const [x, y] = points.slice(-2);
    const up = points[points.length - 3] > y ? 1 : -1;
    const size = 4.5 * Math.min(1.2, zoom);
    painter.polygon(
      [x, y, x - size * 0.75, y + up * size * 1.4, x + size * 0.75, y + up * size * 1.4],
      color,
    );
  }
}

/** Cuts values into at most `most` parts of about equal length, none of which is empty. */
export function partition(values: readonly number[], most: number): number[][] {
  const parts = Math.min(most, values.length);
  const start = (part: number) => Math.floor((part * values.length) / parts);
  return Array.from({ length: parts }, (_, part) => values.slice(start(part), start(part + 1)));
}
