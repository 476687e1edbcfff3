/** What every view works with. */

import type { Model } from "./model";
import type { Overlay, OverlayMaker } from "./overlay";
import type { Painter } from "./painter";
import type { Hits } from "./search";
import type { State, Store } from "./state";

export interface Context {
  readonly model: Model;
  readonly store: Store;
  readonly overlays: OverlayMaker;
  /** What the query finds now. */
  hits: Hits;
  /** The chosen overlay at the chosen step. */
  overlay: Overlay | null;
  select(selection: Partial<Pick<State, "module" | "node" | "site" | "step" | "view">>): void;
  /** Ends when the page is shown anew, with what listens outside of it. */
  readonly signal: AbortSignal;
  /** Tells a screen reader, and shows for a moment. */
  say(text: string): void;
}

/** A table that says what a picture shows. */
export interface TextTable {
  caption: string;
  head: string[];
  body: string[][];
}

export interface View {
  readonly element: HTMLElement;
  /** Draws anew after a change of the state; is called only while the view is shown, or becomes so. */
  update(changed: ReadonlySet<keyof State>): void;
  table?(): TextTable;
  /** Draws what is shown now onto something else, for a file. */
  picture?(): Picture;
  /** Goes on where the view of an earlier state of the same recording was; is called when both are drawn. */
  resume?(before: View): void;
  /** Handles a key that nothing before it wanted; returns whether it did. */
  onKey?(event: KeyboardEvent): boolean;
}

export interface Picture {
  width: number;
  height: number;
  paint(painter: Painter): void;
}
