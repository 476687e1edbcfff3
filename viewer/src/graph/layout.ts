/** Places what is open: rows from top to bottom, in the order of execution, each item with its left edge below that of
 * what it reads. What opens keeps its top-left corner; only what is behind it moves. */

import { findRange } from "../colors";
import type { Model } from "../model";
import { type Level, LevelMaker } from "./levels";

export const TITLE = 24;
export const PAD = 14;
export const ROW_GAP = 26;
const COLUMN_GAP = 18;
const PHASE_GAP = 46;
export const NODE_HEIGHT = 38;
const LEAF_HEIGHT = 22;
const CHANNEL = 7;
/** Rows with more items than this are broken into lines, and lines to them are drawn only if they are chosen. */
export const CROWD = 8;
const LINE_GAP = 8;

/** Of each node: left and top within its level's owner, and its size. */
export interface Positions {
  x: Float64Array;
  y: Float64Array;
  width: Float64Array;
  height: Float64Array;
}

interface Placed {
  levels: readonly Level[];
  /** Width and height of each item, and of each level's owner. */
  inside: Float64Array;
  outside: (readonly [number, number])[];
}

function isSame(one: readonly Level[], other: readonly Level[]): boolean {
  return one.length === other.length && one.every((each, at) => each === other[at]);
}

export class GraphLayout implements Positions {
  readonly levels: LevelMaker;
  x: Float64Array;
  y: Float64Array;
  width: Float64Array;
  height: Float64Array;
  /** The top and bottom of each row of a level, within its owner. */
  readonly bands = new Map<number, Float64Array>();
  /** The size of the whole picture. */
  wide = 0;
  high = 0;

  /** How far the lines of the whole graph reach to the left of its nodes. */
  get left(): number {
    return 7 * (this.levels.level(-1).channels + 1);
  }
  /** How levels that share their rows were placed last, by the first of them. */
  private readonly placed = new WeakMap<Level, Placed>();
  /** The width of each node while it is closed; 0 while that is not known. */
  private readonly closedWidth: Float64Array;
  private open: ReadonlySet<number> = new Set();
  private unfolded: ReadonlySet<number> = new Set();
  private showsBackward = true;

  constructor(private readonly model: Model) {
    this.levels = new LevelMaker(model);
    const { size } = model.graph;
    this.x = new Float64Array(size);
    this.y = new Float64Array(size);
    this.width = new Float64Array(size);
    this.height = new Float64Array(size);
    this.closedWidth = new Float64Array(size);
  }

  isOpen(node: number): boolean {
    return this.open.has(node) && this.model.graph.children(node).length > 0;
  }

  /** Whether a node stands for equal siblings that are not shown. */
  isFolded(node: number): boolean {
    return !this.unfolded.has(node);
  }

  /** Whether a node of the outermost level is drawn. */
  isShown(node: number): boolean {
    return (
      this.showsBackward ||
      !["backward", "recompute"].includes(this.model.phase(node)) ||
      this.model.graph.parent[node] >= 0
    );
  }

  place(
    open: ReadonlySet<number>,
    unfolded: ReadonlySet<number>,
    showsLeaves: boolean,
    showsViews: boolean,
    showsBackward: boolean,
  ): void {
    this.open = open;
    this.unfolded = unfolded;
    this.showsBackward = showsBackward;
    this.levels.fold({ unfolded, showsLeaves, showsViews });
    for (const levels of this.listLevels()) this.placeChanged(levels);
    const root = this.levels.level(-1);
    this.placeLevels([root]);
    this.wide = this.high = 1;
    for (const node of root.items) {
      if (!this.isShown(node)) continue;
      this.wide = Math.max(this.wide, this.x[node] + this.width[node]);
      this.high = Math.max(this.high, this.y[node] + this.height[node]);
    }
  }

  /** Lists the open levels, each after those inside it, with those of backward and recompute beside their forward. */
  private listLevels(): Level[][] {
    const { graph } = this.model;
    const groups = new Map<Level, Level[]>();
    const found: Level[][] = [];
    const waiting = Array.from(this.levels.level(-1).items);
    while (waiting.length) {
      const node = waiting.pop()!;
      if (!this.isOpen(node)) {
        this.size(node);
        continue;
      }
      const level = this.levels.level(node);
      const key = level.base ?? level;
      const group = groups.get(key);
      if (group) group.push(level);
      else {
        const fresh = [level];
        groups.set(key, fresh);
        found.push(fresh);
      }
      for (const item of level.items) waiting.push(item);
    }
    const depth = new Map(
      found.map((group) => [group, findRange(group.map(({ owner }) => graph.depth[owner])).high]),
    );
    return found.sort((a, b) => depth.get(b)! - depth.get(a)!);
  }

  /** The size of a closed node. */
  private size(node: number): void {
    this.height[node] = this.levels.isLeaf(node) ? LEAF_HEIGHT : NODE_HEIGHT;
    this.width[node] = this.closedWidth[node] ||= this.measure(node);
  }

  private measure(node: number): number {
    const isLeaf = this.levels.isLeaf(node);
    const note = this.model.nodeNote(node);
    const longest = Math.max(
      (this.model.bothNames(node).length + 4) * 7.6,
      isLeaf ? 0 : (note.length + (this.model.payload.compared ? 17 : 11)) * 6,
    );
    return Math.min(240, Math.max(isLeaf ? 60 : 118, 16 + longest));
  }

  /** Places levels anew if something in them has another size than last time. */
  private placeChanged(levels: readonly Level[]): void {
    const key = levels[0].base ?? levels[0];
    const owners = levels.map(({ owner }) => owner);
    const before = this.placed.get(key);
    if (before && isSame(before.levels, levels) && !this.haveChanged(levels, before.inside)) {
      owners.forEach((owner, at) => ([this.width[owner], this.height[owner]] = before.outside[at]));
      return;
    }
    this.placeLevels(levels);
    const outside = owners.map((owner) => [this.width[owner], this.height[owner]] as const);
    const inside = levels.flatMap(({ items }) =>
      Array.from(items, (node) => [this.width[node], this.height[node]]),
    );
    this.placed.set(key, { levels, inside: Float64Array.from(inside.flat()), outside });
  }

  private haveChanged(levels: readonly Level[], inside: Float64Array): boolean {
    let at = 0;
    for (const { items } of levels)
      for (const node of items)
        if (this.width[node] !== inside[at++] || this.height[node] !== inside[at++]) return true;
    return false;
  }

  /** Places the items of levels that share their rows, and sizes what they are inside of. */
  private placeLevels(levels: readonly Level[]): void {
    const rows = findRange(levels.map((each) => each.rows)).high;
    const heights = new Float64Array(rows);
    const lines = levels.map((level) => this.breakRows(level, heights));
    levels.forEach((level, at) => {
      this.placeLevel(level, lines[at], heights);
    });
  }

  /** Breaks rows with many items into lines; returns the line of each item, and makes `heights` large enough. */
  private breakRows(level: Level, heights: Float64Array): Int32Array {
    const counts = new Int32Array(level.rows);
    const inLine = level.crowd.map((count) =>
      count > CROWD ? Math.max(CROWD, Math.ceil(Math.sqrt(count * 1.5))) : CROWD,
    );
    const line = new Int32Array(level.items.length);
    const tall: number[][] = Array.from({ length: level.rows }, () => [0]);
    level.items.forEach((node, item) => {
      if (level.owner < 0 && !this.isShown(node)) return;
      const row = level.row[item];
      line[item] = Math.floor(counts[row]++ / inLine[row]);
      tall[row][line[item]] = Math.max(tall[row][line[item]] ?? 0, this.height[node]);
    });
    tall.forEach((each, row) => {
      heights[row] = Math.max(
        heights[row],
        each.reduce((sum, height) => sum + height + LINE_GAP, -LINE_GAP),
      );
    });
    return line;
  }

  private placeLevel(level: Level, line: Int32Array, heights: Float64Array): void {
    const { owner, items } = level;
    const isRoot = owner < 0;
    const bands = this.stackRows(level, heights, isRoot ? 0 : TITLE + PAD);
    const start = isRoot ? 0 : PAD + level.channels * CHANNEL;
    this.placeInRows(level, line, bands, start);
    if (isRoot) return;
    let right = start + 90;
    for (const node of items) right = Math.max(right, this.x[node] + this.width[node]);
    this.width[owner] = right + PAD;
    this.height[owner] = (bands.at(-1) ?? TITLE + PAD) + PAD;
  }

  private stackRows(level: Level, heights: Float64Array, top: number): Float64Array {
    const bands = new Float64Array(heights.length * 2);
    let y = top;
    heights.forEach((height, row) => {
      bands[row * 2] = y;
      bands[row * 2 + 1] = y + height;
      y += height + (height ? ROW_GAP : 0);
    });
    this.bands.set(level.owner, bands);
    return bands;
  }

  private placeInRows(level: Level, line: Int32Array, bands: Float64Array, start: number): void {
    const wanted = this.wantedLeft(level, start);
    const filled = new Map<number, { right: number; bottom: number }>();
    level.items.forEach((node, item) => {
      if (level.owner < 0 && !this.isShown(node)) return;
      const row = level.row[item];
      const key = row * 1000 + line[item];
      const above = line[item] ? filled.get(key - 1) : undefined;
      const before = filled.get(key);
      const gap = level.owner < 0 && row === 0 ? PHASE_GAP : COLUMN_GAP;
      const x = before ? Math.max(before.right + gap, wanted(item)) : line[item] ? start : wanted(item);
      const y = above ? above.bottom + LINE_GAP : bands[row * 2];
      this.x[node] = x;
      this.y[node] = y;
      filled.set(key, {
        right: x + this.width[node],
        bottom: Math.max(before?.bottom ?? 0, y + this.height[node]),
      });
    });
  }

  /** The left edge of the first thing that an item reads, where that is placed already. */
  private wantedLeft(level: Level, start: number): (item: number) => number {
    const { base } = level;
    if (base) {
      const { table } = this.model.graph;
      const isBeside = new Set(base.items);
      return (item) => {
        const twin = this.levels.shown(Math.max(0, table.link("twin", level.items[item])));
        return isBeside.has(twin) ? Math.max(start, this.x[twin]) : start;
      };
    }
    const first = new Int32Array(level.items.length).fill(-1);
    for (let each = 0; each < level.from.length; each++) {
      const [from, to] = [level.from[each], level.to[each]];
      if (
        to >= 0 &&
        from >= 0 &&
        from < to &&
        level.row[from] < level.row[to] !== level.isFlipped &&
        first[to] < 0
      )
        first[to] = from;
    }
    return (item) => (first[item] < 0 ? start : Math.max(start, this.x[level.items[first[item]]]));
  }

  /** The left and top of a node in the whole picture. */
  position(node: number): [number, number] {
    let [x, y] = [0, 0];
    for (let each = node; each >= 0; each = this.model.graph.parent[each]) {
      x += this.x[each];
      y += this.y[each];
    }
    return [x, y];
  }
}

/** Positions on their way from one layout to the next. */
export class Motion {
  private readonly before: Float64Array[];

  constructor(private readonly layout: GraphLayout) {
    this.before = [layout.x, layout.y, layout.width, layout.height].map((each) => each.slice());
  }

  /** Returns positions between the layout before and that after; nodes that were not there before are where they belong. */
  at(share: number): Positions {
    const { layout } = this;
    const [x, y, width, height] = [layout.x, layout.y, layout.width, layout.height].map((after, which) => {
      const before = this.before[which];
      return after.map((value, node) =>
        this.before[2][node] ? before[node] + (value - before[node]) * share : value,
      );
    });
    return { x, y, width, height };
  }
}
