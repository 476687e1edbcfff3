/** The graph by levels: what lies directly inside each layer, in which rows, and the lines between. */

import { findRange } from "../colors";
import type { Model } from "../model";

/** The ends of a line that comes into a level from outside, or leaves it. */
export const IN = -1;
export const OUT = -2;

const LEAVES = new Set(["parameter", "buffer", "constant", "earlier"]);
const MOST_CHANNELS = 10;
/** A backward goes back to a recompute, which repeats a forward. */
const MOST_TWINS = 8;

/** The inside of one layer. Lines run from item `from[i]` to item `to[i]`, by their positions in `items`. */
export interface Level {
  owner: number;
  items: Int32Array;
  row: Int32Array;
  rows: number;
  /** How many items are in each row. */
  crowd: Int32Array;
  from: Int32Array;
  to: Int32Array;
  /** The channel on the left that a line takes past other rows; -1 for a line to the next row. */
  channel: Int32Array;
  channels: number;
  /** How many lines pass rows on their way in or out. */
  passing: number;
  /** Whether it is drawn from bottom to top, as a backward is. */
  isFlipped: boolean;
  /** The level of the forward that this one goes back through or repeats; its rows are the same. */
  base: Level | null;
}

export interface Folding {
  unfolded: ReadonlySet<number>;
  showsLeaves: boolean;
  /** Whether ops that only return views are shown; else what reads a view is joined to what it is a view of. */
  showsViews: boolean;
}

/** Makes levels, each when it is first shown. */
export class LevelMaker {
  private lines = new Map<number, number[]>();
  /** Ops that only return views of what they read, in layers that do more than that. */
  private readonly isView: Uint8Array;
  private readonly made = new Map<number, Level>();
  private folding: Folding = { unfolded: new Set(), showsLeaves: false, showsViews: false };

  constructor(private readonly model: Model) {
    this.isView = findViews(model);
    this.liftEdges();
  }

  fold(folding: Folding): void {
    const { unfolded, showsLeaves, showsViews } = this.folding;
    const isOther = folding.showsViews !== showsViews;
    if (folding.unfolded === unfolded && folding.showsLeaves === showsLeaves && !isOther) return;
    this.folding = folding;
    if (isOther) this.liftEdges();
    this.made.clear();
  }

  isLeaf(node: number): boolean {
    return LEAVES.has(this.model.payload.tables.nodes.text("kind", node));
  }

  /** Whether a node is left out of its level, as a parameter or as an op that only returns a view. */
  isLeftOut(node: number): boolean {
    return this.isLeaf(node) ? !this.folding.showsLeaves : this.isHiddenView(node);
  }

  isHiddenView(node: number): boolean {
    return !this.folding.showsViews && this.isView[node] > 0;
  }

  get viewCount(): number {
    return this.isView.reduce((sum, each) => sum + each, 0);
  }

  /** The first of equal siblings that a node is shown as, or the node itself. */
  representative(node: number): number {
    const { graph } = this.model;
    const folded = graph.table.link("folded", node);
    const isSibling = folded >= 0 && graph.parent[folded] === graph.parent[node];
    return isSibling && !this.folding.unfolded.has(folded) ? folded : node;
  }

  /** The node that shows another one while equal siblings are folded. */
  shown(node: number): number {
    for (const outer of [...this.model.graph.ancestors(node), node])
      if (this.representative(outer) !== outer) return this.model.graph.table.link("folded", node);
    return node;
  }

  /** The level inside a layer; of -1, the outermost one. */
  level(owner: number): Level {
    let level = this.made.get(owner);
    if (!level) {
      level = this.make(owner);
      this.made.set(owner, level);
    }
    return level;
  }

  private make(owner: number): Level {
    const { graph } = this.model;
    const shown = graph
      .children(owner)
      .filter((node) => this.representative(node) === node && !this.isLeftOut(node));
    const items = this.putFirst(shown);
    const at = new Map(items.map((node, position) => [node, position]));
    const [from, to] = this.linesOf(owner, at);
    const base = this.baseOf(owner);
    const phase = owner >= 0 ? this.model.phase(owner) : "";
    const isFlipped = phase === "backward";
    const row = base ? this.rowsOfTwins(items, base) : this.rank(owner, items, from, to);
    const rows = row.reduce((most, each) => Math.max(most, each + 1), base?.rows ?? 0);
    if (isFlipped && !base) row.forEach((each, item) => (row[item] = rows - 1 - each));
    const { channel, channels } = assignChannels(from, to, row, rows, isFlipped);
    const passing = channel.filter((each, line) => each >= 0 && (from[line] < 0 || to[line] < 0)).length;
    const crowd = new Int32Array(rows);
    for (const each of row) crowd[each] += 1;
    return {
      owner,
      items: Int32Array.from(items),
      row,
      rows,
      crowd,
      from,
      to,
      channel,
      channels,
      passing,
      isFlipped,
      base,
    };
  }

  /** The level of the forward that a layer belongs to. Layers that belong to each other in a circle have none. */
  private baseOf(owner: number): Level | null {
    const twin = owner < 0 ? -1 : this.forwardOf(owner);
    let steps = 0;
    for (let each = twin; each >= 0; each = this.forwardOf(each)) if (++steps > MOST_TWINS) return null;
    return twin < 0 ? null : this.level(twin);
  }

  /** Puts inputs before what reads them, and a recompute between forward and backward. */
  private putFirst(nodes: readonly number[]): number[] {
    const { table } = this.model.graph;
    const key = (node: number) => {
      const kind = table.text("kind", node);
      if (kind === "input") return -1;
      const place = ["forward", "recompute", "backward"].indexOf(this.model.phase(node));
      return kind === "phase" && place >= 0 ? place : 3;
    };
    return [...nodes].sort((a, b) => key(a) - key(b));
  }

  /** The forward layer that a backward or recomputed layer belongs to, as it is shown; -1 for none. */
  forwardOf(node: number): number {
    const { graph } = this.model;
    const phase = this.model.phase(node);
    if (graph.parent[node] < 0 && (phase === "backward" || phase === "recompute"))
      return (
        graph.children(-1).find((each) => this.model.isLayer(each) && this.model.phase(each) === "forward") ??
        -1
      );
    const twin = graph.table.link("twin", node);
    return twin >= 0 && twin < graph.size && this.model.isLayer(twin) ? this.shown(twin) : -1;
  }

  /** The layers of backward and recompute that belong to a forward one, or to those it stands for, as they are shown. */
  twinsOf(node: number): number[] {
    const { table } = this.model.graph;
    const members = table.link("folded", node) >= 0 ? [] : this.model.foldedInto.get(node);
    return [node, ...members]
      .flatMap((each) => [...this.model.twinsOf.get(each)])
      .map((each) => this.shown(each));
  }

  private linesOf(owner: number, at: ReadonlyMap<number, number>): [Int32Array, Int32Array] {
    const raw = this.lines.get(owner) ?? [];
    const seen = new Set<number>();
    const from: number[] = [];
    const to: number[] = [];
    const position = (node: number) => (node < 0 ? node : at.get(this.representative(node)));
    for (let each = 0; each < raw.length; each += 2) {
      const [source, target] = [position(raw[each]), position(raw[each + 1])];
      if (source === undefined || target === undefined || source === target) continue;
      const key = (source + 2) * (at.size + 3) + target + 2;
      if (seen.has(key)) continue;
      seen.add(key);
      from.push(source);
      to.push(target);
    }
    return [Int32Array.from(from), Int32Array.from(to)];
  }

  /** Puts each item into the row below all that it reads; leaves go right above their first reader. */
  private rank(owner: number, items: readonly number[], from: Int32Array, to: Int32Array): Int32Array {
    const row = new Int32Array(items.length).fill(-1);
    const reads: number[][] = items.map(() => []);
    const readBy: number[][] = items.map(() => []);
    const hasLine = new Uint8Array(items.length);
    for (let line = 0; line < from.length; line++) {
      if (from[line] >= 0) hasLine[from[line]] = 1;
      if (to[line] >= 0) hasLine[to[line]] = 1;
      if (from[line] < 0 || to[line] < 0 || from[line] > to[line]) continue;
      reads[to[line]].push(from[line]);
      readBy[from[line]].push(to[line]);
    }
    if (owner < 0) this.rankPhases(items, row);
    const first = owner < 0 ? 1 : 0;
    let last = first - 1;
    items.forEach((_, item) => {
      if (row[item] >= 0) return;
      if (reads[item].length)
        row[item] = reads[item].reduce((most, read) => Math.max(most, row[read] + 1), first);
      else row[item] = hasLine[item] ? first : last + 1;
      last = Math.max(last, row[item]);
    });
    for (let item = items.length - 1; item >= 0; item--)
      if (!reads[item].length && readBy[item].length && !this.model.isLayer(items[item]))
        row[item] = Math.max(first, findRange(readBy[item].map((reader) => row[reader])).low - 1);
    return row;
  }

  /** Forward, recompute and backward stand beside each other in the first row. */
  private rankPhases(items: readonly number[], row: Int32Array): void {
    items.forEach((node, item) => {
      const kind = this.model.graph.table.text("kind", node);
      if (kind === "phase" && this.model.phase(node) !== "optimizer") row[item] = 0;
    });
  }

  /** The rows of what items go back through; an item without such a twin is in the row of the one before it, and one
   * that is in no module below them all. */
  private rowsOfTwins(items: readonly number[], base: Level): Int32Array {
    const rowOf = new Map(Array.from(base.items, (node, at) => [node, base.row[at]]));
    const { table } = this.model.graph;
    const known = items.map((node) => {
      const twin = table.link("twin", node);
      return twin < 0 ? undefined : rowOf.get(this.shown(twin));
    });
    if (base.owner >= 0 && this.model.graph.parent[base.owner] < 0)
      return Int32Array.from(known, (each, at) => each ?? (this.model.isLayer(items[at]) ? 0 : base.rows));
    let last = known.find((each) => each !== undefined) ?? 0;
    return Int32Array.from(known, (each) => (last = each ?? last));
  }

  /** Finds for each edge the level where its ends part, and the lines that lead there from inside. */
  private liftEdges(): void {
    const { graph, payload } = this.model;
    const { edges } = payload.tables;
    const sources = edges.column("source");
    const targets = edges.column("target");
    this.lines = new Map();
    if (!sources || !targets) return;
    const isNode = (node: number) => node >= 0 && node < graph.size;
    const viewed = new Map<number, number>();
    for (let edge = 0; edge < edges.rows; edge++) {
      const [source, target] = [sources.number(edge), targets.number(edge)];
      if (isNode(source) && isNode(target) && this.isHiddenView(target) && !viewed.has(target))
        viewed.set(target, source);
    }
    for (let edge = 0; edge < edges.rows; edge++) {
      let [source, target] = [sources.number(edge), targets.number(edge)];
      for (let left = graph.size; left > 0 && viewed.has(source); left--) source = viewed.get(source)!;
      if (!isNode(source) || !isNode(target) || this.isHiddenView(source) || this.isHiddenView(target))
        continue;
      const leaving: number[] = [];
      const entering: number[] = [];
      while (graph.parent[source] !== graph.parent[target]) {
        const sourceIsDeeper = graph.depth[source] >= graph.depth[target];
        const targetIsDeeper = graph.depth[target] >= graph.depth[source];
        if (sourceIsDeeper) {
          leaving.push(source);
          source = graph.parent[source];
        }
        if (targetIsDeeper) {
          entering.push(target);
          target = graph.parent[target];
        }
      }
      const crossesPhases =
        graph.parent[source] < 0 && graph.children(source).length > 0 && graph.children(target).length > 0;
      if (source === target || crossesPhases) continue;
      this.addLine(graph.parent[source], source, target);
      for (const node of leaving) this.addLine(graph.parent[node], node, OUT);
      for (const node of entering) this.addLine(graph.parent[node], IN, node);
    }
  }

  private addLine(owner: number, source: number, target: number): void {
    const lines = this.lines.get(owner);
    if (lines) lines.push(source, target);
    else this.lines.set(owner, [source, target]);
  }
}

/** Finds the ops that only return views, but for those that failed or are all that their layer does. */
function findViews({ graph, failures, origins }: Model): Uint8Array {
  const { table } = graph;
  const found = new Uint8Array(graph.size);
  const works = new Uint8Array(graph.size);
  const kept = new Set([...failures.nodes, ...origins.nodes]);
  for (let at = graph.size - 1; at >= 0; at--) {
    const node = graph.order[at];
    const kind = table.text("kind", node);
    if (kind === "op" && table.number("is_view", node) > 0 && !kept.has(node)) found[node] = 1;
    else if (kind === "op" || kind === "call") works[node] = 1;
    if (works[node] && graph.parent[node] >= 0) works[graph.parent[node]] = 1;
  }
  return found.map((isView, node) =>
    isView && (graph.parent[node] < 0 || works[graph.parent[node]]) ? 1 : 0,
  );
}

/** Gives lines that pass other rows a channel each, shared by lines whose rows do not overlap. */
function assignChannels(from: Int32Array, to: Int32Array, row: Int32Array, rows: number, isFlipped: boolean) {
  const channel = new Int32Array(from.length).fill(-1);
  const free: number[] = [];
  const start = (line: number) => (from[line] === IN ? (isFlipped ? rows : -1) : row[from[line]]);
  const end = (line: number) => (to[line] === OUT ? (isFlipped ? -1 : rows) : row[to[line]]);
  const order = Array.from(from, (_, line) => line).sort(
    (a, b) => Math.min(start(a), end(a)) - Math.min(start(b), end(b)),
  );
  for (const line of order) {
    const [low, high] = [Math.min(start(line), end(line)), Math.max(start(line), end(line))];
    if (high - low < 2) continue;
    let at = free.findIndex((until) => until <= low);
    if (at < 0) at = free.length < MOST_CHANNELS ? free.length : line % MOST_CHANNELS;
    free[at] = Math.max(free[at] ?? 0, high);
    channel[line] = at;
  }
  return { channel, channels: free.length };
}
