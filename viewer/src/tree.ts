/** A tree of rows of a table, each with the row that it is inside of. */

import type { Column, Table } from "./payload";

export class Tree {
  readonly size: number;
  readonly parent: Int32Array;
  readonly depth: Int32Array;
  /** All rows, each before what is inside it. */
  readonly order: Int32Array;
  /** The position of each row in `order`, and the position after the last one inside it. */
  readonly position: Int32Array;
  readonly end: Int32Array;
  private readonly inside: (number[] | undefined)[] = [];
  private readonly outermost: number[] = [];

  /** `time`, a column, puts rows into the order of execution; without it they stay in that of the table. */
  constructor(
    readonly table: Table,
    time?: Column,
  ) {
    this.size = table.rows;
    this.parent = new Int32Array(this.size).fill(-1);
    this.depth = new Int32Array(this.size);
    this.order = new Int32Array(this.size);
    this.position = new Int32Array(this.size).fill(-1);
    this.end = new Int32Array(this.size);
    this.readParents();
    if (time) this.sort(time);
    this.walk();
  }

  /** Reads what is inside what. A parent that is not there, or not before its child, is none. */
  private readParents(): void {
    const parents = this.table.column("parent");
    for (let row = 0; row < this.size; row++) {
      const parent = parents ? parents.number(row) : -1;
      if (parent >= 0 && parent < row) {
        this.parent[row] = parent;
        (this.inside[parent] ??= []).push(row);
      } else this.outermost.push(row);
    }
  }

  private sort(time: Column): void {
    const key = (row: number) => {
      const value = time.number(row);
      return Number.isNaN(value) ? Infinity : value;
    };
    for (const children of [this.outermost, ...this.inside])
      children?.sort((a, b) => (key(a) === key(b) ? a - b : key(a) - key(b)));
  }

  private walk(): void {
    const stack = [...this.outermost].reverse();
    let at = 0;
    while (stack.length) {
      const row = stack.pop()!;
      if (row < 0) {
        this.end[~row] = at;
        continue;
      }
      this.position[row] = at;
      this.order[at++] = row;
      this.depth[row] = this.parent[row] < 0 ? 0 : this.depth[this.parent[row]] + 1;
      stack.push(~row);
      const children = this.children(row);
      for (let each = children.length - 1; each >= 0; each--) stack.push(children[each]);
    }
  }

  /** What is directly inside a row; of -1, the outermost rows. */
  children(row: number): readonly number[] {
    return row < 0 ? this.outermost : (this.inside[row] ?? []);
  }

  /** The rows around a row, the outermost first. */
  ancestors(row: number): number[] {
    const found: number[] = [];
    for (let outer = row < 0 ? -1 : this.parent[row]; outer >= 0; outer = this.parent[outer])
      found.push(outer);
    return found.reverse();
  }

  /** The values of a column for all rows; a group without one has what the column says of the rows inside it. */
  values(column: Column): Float64Array {
    const values = new Float64Array(this.size);
    for (let row = 0; row < this.size; row++) values[row] = column.number(row);
    this.fillGroups(values, column.dictionary === null ? column.spec.aggregate : "none");
    return values;
  }

  /** Gives each group without a value the aggregate of what is directly inside it. */
  fillGroups(values: Float64Array, aggregate: string): void {
    for (let at = this.size - 1; at >= 0; at--) {
      const row = this.order[at];
      const children = this.inside[row];
      if (children && Number.isNaN(values[row])) values[row] = combine(values, children, aggregate);
    }
  }
}

/** Combines the values of some rows as a column says that its values combine. Rows without a value do not count. */
export function combine(values: Float64Array, rows: readonly number[], aggregate: string): number {
  let result = NaN;
  let count = 0;
  for (const row of rows) {
    const value = values[row];
    if (Number.isNaN(value)) continue;
    count += 1;
    if (count === 1) result = value;
    else if (aggregate === "sum" || aggregate === "mean") result += value;
    else if (aggregate === "max" || aggregate === "any") result = Math.max(result, value);
    else if (aggregate === "min") result = Math.min(result, value);
    else if (value !== result) return NaN;
  }
  return aggregate === "mean" && count ? result / count : result;
}
