/** The graph: pan, zoom, open and close, select. */

import { badgeOfNode } from "../badges";
import type { Context, Picture, TextTable, View } from "../context";
import type { Values } from "../overlay";
import { h } from "../dom";
import { shorten } from "../format";
import type { Painter } from "../painter";
import type { State } from "../state";
import { movesLess, readTheme } from "../theme";
import { type Drawn, Drawing } from "../views/canvas";
import { drawScale } from "../views/chart";
import { GraphBar } from "./bar";
import { GraphLayout, Motion, TITLE } from "./layout";
import { Minimap } from "./minimap";
import { paintRelations } from "./relations";
import { nodeBeside } from "./walk";
import { type Camera, GraphPainter, type Scene } from "./paint";

const MOVE_MS = 150;
const MARGIN = 28;

export class GraphView implements View, Drawn {
  readonly element = h("section", { class: "view graph", "aria-label": "Graph" });
  private readonly drawing = new Drawing("Graph of the modules and ops. Press t for a table.", this);
  private readonly bar: GraphBar;
  private readonly layout: GraphLayout;
  private readonly painter = new GraphPainter();
  private readonly minimap: Minimap;
  private camera: Camera = { x: MARGIN, y: MARGIN, zoom: 1 };
  private motion: { from: Motion; began: number; right: number; down: number } | null = null;
  /** The group that was opened or closed last: its corner keeps its place on the screen. */
  private toggled = -1;
  private isFitted = false;
  /** Whether the selection was made elsewhere, and is to come into sight. */
  private isRevealing = false;
  /** A node that was chosen in the picture: it is in sight, and a second click is to find it where it was. */
  private picked: number | null = null;
  private isWaiting = false;
  private placed: unknown[] = [];

  constructor(private readonly context: Context) {
    const { model } = context;
    this.layout = new GraphLayout(model);
    this.minimap = new Minimap((x, y) => {
      this.camera.x = this.drawing.width / 2 - x * this.camera.zoom;
      this.camera.y = this.drawing.height / 2 - y * this.camera.zoom;
      this.schedule();
    });
    this.minimap.element.hidden = !model.graph.size;
    this.drawing.element.append(this.minimap.element);
    this.drawing.canvas.addEventListener("dblclick", (event) => {
      const node = this.nodeAt(event.offsetX, event.offsetY);
      if (node >= 0) this.toggle(node);
    });
    const actions = {
      fit: () => { this.fit(); },
      openAll: () => { this.openAll(-1); },
      update: () => { this.update(new Set()); },
    }; // prettier-ignore
    this.bar = new GraphBar(context, actions, this.layout.levels.viewCount);
    this.element.append(this.bar.element, this.drawing.element);
  }

  private get state(): State {
    return this.context.store.state;
  }

  /** The chosen node, or that of the chosen module. */
  private get chosen(): number {
    const { node, module } = this.state;
    const chosen = node >= 0 ? node : module >= 0 ? this.context.model.nodeOfModule(module) : -1;
    return chosen < this.context.model.graph.size ? chosen : -1;
  }

  /** The node that is drawn as selected. */
  private get selected(): number {
    return this.chosen < 0 ? -1 : this.layout.levels.shown(this.chosen);
  }

  resume(before: View): void {
    if (before instanceof GraphView) ({ camera: this.camera, isFitted: this.isFitted } = before);
  }

  private openAll(node: number): void {
    const { graph } = this.context.model;
    const rows = node < 0 ? graph.order : graph.order.subarray(graph.position[node], graph.end[node]);
    const open = new Set(this.state.graphOpen);
    for (const row of rows) if (graph.children(row).length) open.add(row);
    this.context.store.update({ graphOpen: open });
  }

  scrollBy(pixels: number): void {
    this.pan(-pixels, 0);
  }

  pan(right: number, down: number): void {
    this.camera.x += right;
    this.camera.y += down;
    this.schedule();
  }

  zoom(factor: number, x: number, y: number): void {
    const zoom = Math.max(0.0005, Math.min(3, this.camera.zoom * factor));
    const by = zoom / this.camera.zoom;
    this.camera = { x: x - (x - this.camera.x) * by, y: y - (y - this.camera.y) * by, zoom };
    this.schedule();
  }

  /** Shows the whole graph; at first only as much as can be read. */
  private fit(smallest = 0): void {
    const { width, height } = this.drawing;
    const { left } = this.layout;
    const whole = Math.min(
      (width - 2 * MARGIN) / (this.layout.wide + left),
      (height - 2 * MARGIN) / this.layout.high,
      1.2,
    );
    const zoom = Math.max(whole, smallest);
    this.camera = {
      x: Math.max(MARGIN, (width - (this.layout.wide + left) * zoom) / 2) + left * zoom,
      y: Math.max(MARGIN, (height - this.layout.high * zoom) / 2),
      zoom,
    };
    this.schedule();
  }

  pick(x: number, y: number): void {
    const node = this.nodeAt(x, y);
    if (node < 0) return;
    const place = this.painter.drawn.get(node)!;
    const isOnTwist = x < place.x + 20 * this.camera.zoom && y < place.y + TITLE * this.camera.zoom;
    if (isOnTwist && this.context.model.graph.children(node).length) this.toggle(node);
    else {
      this.picked = node;
      this.go(node);
    }
  }

  /** The innermost node that was drawn at a point. */
  private nodeAt(x: number, y: number): number {
    let found = -1;
    for (const [node, place] of this.painter.drawn)
      if (x >= place.x && x <= place.x + place.width && y >= place.y && y <= place.y + place.height)
        if (found < 0 || this.context.model.graph.depth[node] > this.context.model.graph.depth[found])
          found = node;
    return found;
  }

  /** Opens or closes a group, and what goes back through it or repeats it. */
  private toggle(node: number): void {
    const { model, store } = this.context;
    if (!model.graph.children(node).length) return;
    const isOpen = !this.state.graphOpen.has(node);
    const open = new Set(this.state.graphOpen);
    this.toggled = node;
    const forward = this.layout.levels.forwardOf(node);
    const base = forward >= 0 ? forward : node;
    for (const each of [node, base, ...this.layout.levels.twinsOf(base)])
      if (isOpen) open.add(each);
      else open.delete(each);
    store.update({ graphOpen: open });
  }

  update(changed: ReadonlySet<keyof State>): void {
    if (changed.has("view") || this.picked !== this.state.node)
      this.isRevealing ||= ["node", "module", "view"].some((key) => changed.has(key as keyof State));
    this.picked = null;
    if (this.isRevealing && this.layout.levels.isLeaf(this.selected)) this.bar.shows.leaves = true;
    if (this.isRevealing && this.layout.levels.isHiddenView(this.chosen)) this.bar.shows.views = true;
    this.bar.update();
    this.place();
    if (!this.isFitted && this.drawing.width) {
      this.isFitted = true;
      this.fit(0.8);
    }
    if (this.isRevealing) this.reveal();
    this.schedule();
  }

  /** Lays out anew if what is open has changed, and moves there from where things were. */
  private place(): void {
    const { graphOpen, unfolded, backward } = this.state;
    const wanted = [graphOpen, unfolded, this.bar.shows.leaves, this.bar.shows.views, backward];
    if (wanted.every((each, at) => each === this.placed[at])) return;
    const isFirst = !this.placed.length;
    this.placed = wanted;
    const from = new Motion(this.layout);
    const [x, y] = this.layout.position(this.toggled);
    this.layout.place(graphOpen, unfolded, this.bar.shows.leaves, this.bar.shows.views, backward);
    const [left, top] = this.layout.position(this.toggled);
    this.toggled = -1;
    const [right, down] = [(left - x) * this.camera.zoom, (top - y) * this.camera.zoom];
    this.pan(-right, -down);
    this.minimap.forget();
    this.motion = isFirst || movesLess() ? null : { from, began: performance.now(), right, down };
  }

  /** Opens and unfolds what is around the selection; once all is, moves the view so that it can be seen. */
  private reveal(): void {
    const { chosen, layout } = this;
    const { graphOpen, unfolded, backward } = this.state;
    const { graph } = this.context.model;
    const around = graph.ancestors(chosen);
    const isHidden = chosen >= 0 && !layout.isShown(around[0] ?? chosen);
    const folded = [...around, chosen].find((node) => layout.levels.representative(node) !== node) ?? -1;
    this.isRevealing = isHidden || folded >= 0 || around.some((node) => !graphOpen.has(node));
    if (this.isRevealing)
      this.context.store.update({
        backward: isHidden || backward,
        graphOpen: new Set([...graphOpen, ...around]),
        unfolded: folded < 0 ? unfolded : new Set([...unfolded, graph.table.link("folded", folded)]),
      });
    else if (chosen >= 0) this.bringIntoSight(chosen);
  }

  private bringIntoSight(selected: number): void {
    const { zoom } = this.camera;
    const { width, height } = this.drawing;
    const [left, top] = this.layout.position(selected);
    const x = this.camera.x + left * zoom;
    const y = this.camera.y + top * zoom;
    const [wide, high] = [
      this.layout.width[selected] * zoom,
      Math.min(this.layout.height[selected] * zoom, height / 2),
    ];
    if (x < 0 || x + Math.min(wide, width / 2) > width) this.camera.x += width * 0.4 - x;
    if (y < 0 || y + high > height) this.camera.y += height * 0.4 - y;
  }

  private schedule(): void {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.drawing.draw();
    });
  }

  paint(painter: Painter, width: number, height: number): void {
    const { context } = this;
    if (!this.placed.length) return;
    if (!context.model.graph.size) {
      painter.text("This recording has no graph: record with ops=True to see one.", 20, 40, {
        color: readTheme().dim,
      });
      return;
    }
    const share = this.motion ? Math.min(1, (performance.now() - this.motion.began) / MOVE_MS) : 1;
    const scene = this.scene(share);
    const rest = this.motion ? (1 - share) ** 2 : 0;
    const { x, y, zoom } = this.camera;
    const camera = { x: x + rest * (this.motion?.right ?? 0), y: y + rest * (this.motion?.down ?? 0), zoom };
    this.painter.paint(painter, scene, camera, width, height);
    paintRelations(painter, scene, this.painter.drawn, (node) => this.visible(node));
    this.minimap.draw(scene, this.camera, width, height);
    if (share < 1) this.schedule();
    else this.motion = null;
  }

  private scene(share: number): Scene {
    const { context, layout } = this;
    const { model } = context;
    const { selected } = this;
    const related = new Set(
      selected < 0
        ? []
        : this.layout.levels.twinsOf(Math.max(selected, this.layout.levels.forwardOf(selected))),
    );
    related.delete(selected);
    const hits = new Set(context.hits.nodes.map((node) => this.visible(node)));
    for (const module of context.hits.modules) hits.add(this.visible(model.nodeOfModule(module)));
    const at = this.motion && share < 1 ? this.motion.from.at(1 - (1 - share) ** 2) : layout;
    return {
      model,
      layout,
      at,
      overlay: context.overlay,
      hasBadges: model.hasBadges(this.state),
      value: (node) => this.value(node),
      drawn: (node) => this.value(node, context.overlay?.drawn),
      selected,
      related,
      hits,
      theme: readTheme(),
    };
  }

  /** What the overlay says of a node, together with those that it stands for. */
  private value(node: number, values: Values | null = this.context.overlay): number {
    const [other] = this.context.model.foldedInto.get(node);
    const standsForOthers = other !== undefined && this.layout.levels.shown(other) === node;
    return (standsForOthers ? values?.folded : values?.nodes)?.[node] ?? NaN;
  }

  private valueText(node: number): string {
    const value = this.value(node);
    return Number.isNaN(value) ? "" : this.context.overlay!.text(value);
  }

  /** The node, or the outermost closed group around it. */
  private visible(node: number): number {
    if (node < 0) return -1;
    const shown = this.layout.levels.shown(node);
    return this.context.model.graph.ancestors(shown).find((outer) => !this.layout.isOpen(outer)) ?? shown;
  }

  describe(x: number, y: number): string {
    const node = this.nodeAt(x, y);
    if (node < 0) return "";
    const { model, overlay } = this.context;
    const value = this.valueText(node);
    const lines = [
      shorten(model.nodePath(node), 300),
      model.graph.table.text("shape", node),
      value && `${overlay?.choice.label}: ${value}`,
      model.hasBadges(this.state) && badgeOfNode(model, node)?.title,
    ];
    return lines.filter(Boolean).join("\n");
  }

  onKey(event: KeyboardEvent): boolean {
    const { model, store } = this.context;
    const { selected } = this;
    const { graph } = model;
    const isGroup = selected >= 0 && graph.children(selected).length > 0;
    const isOpen = this.state.graphOpen.has(selected);
    const middle: [number, number] = [this.drawing.width / 2, this.drawing.height / 2];
    if (event.key === " ") this.fit();
    else if (event.key === "+" || event.key === "=") this.zoom(1.3, ...middle);
    else if (event.key === "-") this.zoom(1 / 1.3, ...middle);
    else if (event.key === "e" && isGroup && !isOpen) this.toggle(selected);
    else if (event.key === "c" && isGroup && isOpen) this.toggle(selected);
    else if (event.key === "c" && selected >= 0 && graph.parent[selected] >= 0)
      this.go(graph.parent[selected]);
    else if (event.key === "E") this.openAll(selected);
    else if (event.key === "C") store.update({ graphOpen: new Set(graph.children(-1)) });
    else if (event.key.startsWith("Arrow")) {
      const next = nodeBeside(this.layout, graph, selected, event.key);
      if (next >= 0) this.go(next);
    } else return false;
    return true;
  }

  private go(node: number): void {
    this.context.select({ node, module: this.context.model.moduleOfNode(node), site: -1 });
  }

  /** The whole graph as it is open, with all names, and what its colours mean. */
  picture(): Picture {
    const { context, layout } = this;
    const { overlay, model } = context;
    const top = 2 * MARGIN + (overlay ? 32 : 0);
    const camera = { x: MARGIN + layout.left, y: top, zoom: 1 };
    const width = Math.max(360, Math.ceil(layout.wide) + layout.left + 2 * MARGIN);
    const height = Math.ceil(layout.high) + top + MARGIN;
    const paint = (painter: Painter) => {
      const graph = new GraphPainter();
      const scene = this.scene(1);
      const [title, ...rest] = [
        model.payload.title,
        overlay?.choice.label,
        model.describeMoment(this.state, true),
      ];
      painter.text(shorten(title, 60), MARGIN, 20, { color: scene.theme.text, bold: true });
      painter.text(rest.filter(Boolean).join(" · "), MARGIN, 36, { color: scene.theme.dim, size: 11 });
      if (overlay && !overlay.isKinds)
        drawScale(painter, MARGIN + 60, 44, 330, overlay.scale, (value) => overlay.text(value));
      graph.paint(painter, scene, camera, width, height);
      paintRelations(painter, scene, graph.drawn, (node) => this.visible(node));
    };
    return { width, height, paint };
  }

  table(): TextTable {
    const { model, overlay } = this.context;
    const names = (edges: readonly number[], end: string) =>
      [
        ...new Set(
          edges.map((edge) => model.nodeName(this.visible(model.payload.tables.edges.link(end, edge)))),
        ),
      ]
        .slice(0, 6)
        .join(", ");
    return {
      caption: "Graph: what is on the screen",
      head: ["node", "phase", "shape", overlay?.choice.label ?? "value", ...model.edgeNames],
      body: [...this.painter.drawn.keys()]
        .slice(0, 2000)
        .map((node) => [
          model.nodePath(node),
          model.phase(node),
          model.graph.table.text("shape", node),
          this.valueText(node),
          names(model.into.get(node), "source"),
          names(model.outOf.get(node), "target"),
        ]),
    };
  }
}
