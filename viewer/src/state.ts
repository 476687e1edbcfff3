/** What the reader looks at: one state for all views, which the address (#...) holds too. */

export const VIEWS = ["findings", "modules", "graph", "timeline", "values"] as const;
export type ViewName = (typeof VIEWS)[number];

export interface State {
  view: ViewName;
  /** The selected row of `modules`, and of `nodes` and `sites` where one was chosen; -1 for none. */
  module: number;
  node: number;
  site: number;
  /** A row of `steps`. */
  step: number;
  /** Whether times of modules are medians over steps, and not those of the step. */
  median: boolean;
  /** The key of what colours and bars show. */
  overlay: string;
  query: string;
  /** Open rows of the module tree, and runs of equal blocks of which each one is shown. */
  open: ReadonlySet<number>;
  each: ReadonlySet<number>;
  /** Open layers of the graph, and folded runs that are shown one by one. */
  graphOpen: ReadonlySet<number>;
  unfolded: ReadonlySet<number>;
  /** Columns of the module table that were chosen; null for those that the recording proposes. */
  columns: readonly string[] | null;
  /** A column to sort by, with "-" before it for the greatest first. */
  sort: string;
  flat: boolean;
  backward: boolean;
  role: string;
  statistic: string;
  pins: readonly number[];
  theme: "auto" | "light" | "dark";
}

type Key = keyof State;

const NUMBERS = ["module", "node", "site", "step"] as const;
const TEXTS = ["overlay", "query", "sort", "role", "statistic"] as const;
const SETS = ["open", "each", "graphOpen", "unfolded"] as const;
const FLAGS = ["flat", "backward", "median"] as const;
/** A change of these is a place to come back to. */
const PLACES: readonly Key[] = ["view", "module", "node", "site"];
/** An address holds no more open rows than this. */
const MOST_OPEN = 400;

/** Writes what differs from the state at the start. */
export function encodeState(state: State, start: State): string {
  const parts = new URLSearchParams();
  for (const key of ["view", "theme", ...NUMBERS, ...TEXTS] as const)
    if (state[key] !== start[key]) parts.set(key, String(state[key]));
  for (const key of FLAGS) if (state[key] !== start[key]) parts.set(key, state[key] ? "1" : "0");
  for (const key of SETS) if (!isSame(state[key], start[key])) parts.set(key, encodeRows([...state[key]]));
  if (state.pins.length) parts.set("pins", state.pins.join("."));
  if (state.columns) parts.set("columns", state.columns.join("~"));
  return parts.toString();
}

/** Reads an address. What is odd in it is left as at the start. */
export function decodeState(text: string, start: State): State {
  const parts = new URLSearchParams(text.replace(/^#/, ""));
  const state = { ...start };
  for (const key of NUMBERS)
    if (/^-?\d{1,9}$/.test(parts.get(key) ?? "")) state[key] = Number(parts.get(key));
  for (const key of TEXTS) state[key] = parts.get(key) ?? start[key];
  for (const key of FLAGS) if (parts.has(key)) state[key] = parts.get(key) === "1";
  for (const key of SETS) if (parts.has(key)) state[key] = new Set(decodeRows(parts.get(key) ?? ""));
  const view = VIEWS.find((each) => each === parts.get("view"));
  if (view) state.view = view;
  const theme = parts.get("theme");
  if (theme === "light" || theme === "dark" || theme === "auto") state.theme = theme;
  if (parts.has("pins"))
    state.pins = (parts.get("pins") ?? "").split(".").filter(Boolean).map(Number).filter(Number.isInteger);
  if (parts.has("columns")) state.columns = (parts.get("columns") ?? "").split("~").filter(Boolean);
  return state;
}

/** Writes rows as the differences between them in base 36, which is short where they lie close. */
function encodeRows(rows: number[]): string {
  rows.sort((a, b) => a - b);
  return rows
    .slice(0, MOST_OPEN)
    .map((row, at) => (row - (at ? rows[at - 1] : 0)).toString(36))
    .join(".");
}

function decodeRows(text: string): number[] {
  let row = 0;
  return text
    .split(".")
    .filter((each) => /^[0-9a-z]{1,6}$/.test(each))
    .map((each) => (row += parseInt(each, 36)));
}

function isSame(one: ReadonlySet<number>, other: ReadonlySet<number>): boolean {
  return one.size === other.size && [...one].every((each) => other.has(each));
}

/** Holds the state, tells the views of changes once a frame, and keeps the address. */
export class Store {
  state: State;
  private readonly listeners: ((changed: ReadonlySet<Key>) => void)[] = [];
  private readonly changed = new Set<Key>();
  private isWaiting = false;
  private isPlace = false;

  constructor(
    private readonly start: State,
    signal?: AbortSignal,
  ) {
    this.state = decodeState(location.hash, start);
    const goBack = () => {
      this.set(decodeState(location.hash, start), false);
    };
    addEventListener("popstate", goBack, { signal });
  }

  listen(listener: (changed: ReadonlySet<Key>) => void): void {
    this.listeners.push(listener);
  }

  update(change: Partial<State>): void {
    this.set({ ...this.state, ...change }, true);
  }

  /** Puts a row into one of the sets, or takes it out. */
  toggle(key: (typeof SETS)[number], row: number, isIn = !this.state[key].has(row)): void {
    const rows = new Set(this.state[key]);
    if (isIn) rows.add(row);
    else rows.delete(row);
    this.update({ [key]: rows });
  }

  private set(state: State, isOurs: boolean): void {
    const before = this.state;
    this.state = state;
    for (const key of Object.keys(state) as Key[]) if (before[key] !== state[key]) this.changed.add(key);
    if (isOurs && PLACES.some((key) => before[key] !== state[key])) this.isPlace = true;
    if (this.isWaiting || !this.changed.size) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.tell(isOurs);
    });
  }

  private tell(isOurs: boolean): void {
    const changed = new Set(this.changed);
    this.changed.clear();
    this.isWaiting = false;
    if (isOurs) this.writeAddress();
    for (const listener of this.listeners) listener(changed);
  }

  /** A frame without an origin may refuse this; the page works without an address then. */
  private writeAddress(): void {
    const address = `#${encodeState(this.state, this.start)}`;
    try {
      if (this.isPlace) history.pushState(null, "", address);
      else history.replaceState(null, "", address);
    } catch {
      // The state is in memory.
    }
    this.isPlace = false;
  }
}
