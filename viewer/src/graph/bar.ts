/** The buttons above the graph. */

import type { Context } from "../context";
import { button, h } from "../dom";

export interface GraphActions {
  fit(): void;
  openAll(): void;
  /** Draws anew what the switches show. */
  update(): void;
}

export class GraphBar {
  readonly element = h("div", { class: "bar" });
  /** What is shown besides modules and ops: parameters and the like, and ops that only return views. */
  readonly shows = { leaves: false, views: false };
  private readonly hint = h("span", { class: "dim hint" });
  private readonly switches: [HTMLButtonElement, () => boolean][] = [];

  constructor(
    private readonly context: Context,
    actions: GraphActions,
    viewCount: number,
  ) {
    const { store, model } = context;
    this.element.append(
      button("Fit", "Fit the graph into the view (space)", () => {
        actions.fit();
      }),
      button("Open all", "Open all groups", () => {
        actions.openAll();
      }),
      button("Close all", "Close all groups", () => {
        store.update({ graphOpen: new Set(model.graph.children(-1)) });
      }),
    );
    const show = (what: keyof GraphBar["shows"]) => {
      this.shows[what] = !this.shows[what];
      actions.update();
    };
    this.addSwitch(
      button("Backward", "Show backward and recompute beside the forward", () => {
        store.update({ backward: !store.state.backward });
      }),
      () => store.state.backward,
    );
    this.addSwitch(
      button("Parameters", "Show parameters, buffers and constants", () => {
        show("leaves");
      }),
      () => this.shows.leaves,
    );
    const about = "Show ops that only return a view of what they read, such as view, t and detach";
    const views = button(`View ops (${viewCount})`, about, () => {
      show("views");
    });
    views.hidden = !viewCount;
    this.addSwitch(views, () => this.shows.views);
    this.addSwitch(
      button("Unfold", "Show equal siblings one by one, or folded", () => {
        this.unfold();
      }),
      () => store.state.unfolded.size > 0,
    );
    this.element.append(this.hint);
  }

  private addSwitch(element: HTMLButtonElement, isOn: () => boolean): void {
    this.switches.push([element, isOn]);
    this.element.append(element);
  }

  private unfold(): void {
    const { store, model } = this.context;
    const { table } = model.graph;
    const runs = new Set<number>();
    for (let node = 0; node < table.rows; node++)
      if (table.link("folded", node) >= 0) runs.add(table.link("folded", node));
    store.update({ unfolded: store.state.unfolded.size ? new Set() : runs });
  }

  update(): void {
    const { model, store } = this.context;
    for (const [element, isOn] of this.switches) element.setAttribute("aria-pressed", String(isOn()));
    const hints = [
      model.hasOrder ? "Arrows: the order of calls, not data." : "",
      model.describeMoment(store.state, true),
      "Double click opens.",
    ];
    this.hint.textContent = hints.filter(Boolean).join(" ");
  }
}
