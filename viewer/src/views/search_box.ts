/** The search: a box, and the list of what it finds. */

import type { Context } from "../context";
import { button, h, replaceChildren } from "../dom";
import { shorten } from "../format";
import { search } from "../search";

const MOST_LISTED = 300;
const PAUSE_MS = 120;

export class SearchBox {
  readonly element = h("div", { class: "search", role: "search" });
  private readonly box = h("input", {
    type: "search",
    placeholder: "Search:  op:linear  path:*.attn  time>1ms  nan",
    "aria-label": "Search modules and ops",
    spellcheck: "false",
    autocomplete: "off",
  });
  private readonly results = h("div", { class: "results", role: "group", "aria-label": "Search results" });
  private waiting = 0;

  constructor(private readonly context: Context) {
    this.element.append(this.box, this.results);
    this.results.hidden = true;
    this.box.addEventListener("input", () => {
      clearTimeout(this.waiting);
      this.waiting = window.setTimeout(() => {
        this.ask();
      }, PAUSE_MS);
    });
    this.box.addEventListener("focus", () => {
      this.results.hidden = !context.store.state.query;
    });
    this.element.addEventListener("keydown", (event) => {
      this.onKey(event);
    });
    const close = (event: Event) => {
      if (!this.element.contains(event.target as Node)) this.results.hidden = true;
    };
    document.addEventListener("pointerdown", close, { signal: context.signal });
  }

  focus(): void {
    this.box.focus();
    this.box.select();
  }

  /** Searches anew; is called before the views draw. */
  update(): void {
    const { query } = this.context.store.state;
    if (this.box.value !== query && document.activeElement !== this.box) this.box.value = query;
    this.context.hits = search(this.context.model, query);
    this.list();
  }

  private ask(): void {
    clearTimeout(this.waiting);
    this.context.store.update({ query: this.box.value });
  }

  private list(): void {
    const { model, hits, store } = this.context;
    const { query } = store.state;
    this.results.hidden = !query || !this.element.contains(document.activeElement);
    if (!query) {
      this.results.replaceChildren();
      return;
    }
    const count = `${hits.modules.length} modules, ${hits.nodes.length} nodes of the graph`;
    const { modules, nodes } = model.payload.tables;
    const found = [
      ...hits.modules.map((module) =>
        this.link(model.modulePath(module), modules.text("type", module), module, -1),
      ),
      ...hits.nodes.map((node) =>
        this.link(
          model.nodePath(node),
          `${nodes.text("kind", node)} ${model.phase(node)}`,
          model.moduleOfNode(node),
          node,
        ),
      ),
    ].slice(0, MOST_LISTED);
    const more = hits.modules.length + hits.nodes.length - found.length;
    replaceChildren(
      this.results,
      h("p", { class: hits.problem ? "badtext" : "dim", text: hits.problem || count, role: "status" }),
      ...found,
      more > 0 ? h("p", { class: "dim", text: `and ${more} more` }) : null,
    );
  }

  private link(path: string, note: string, module: number, node: number): HTMLElement {
    const { model, select, store } = this.context;
    const link = button("", path.slice(0, 500), () => {
      this.close();
      const runs = model.modules.ancestors(module).filter((row) => model.hasMembers(row));
      if (runs.some((row) => !store.state.each.has(row)))
        store.update({ each: new Set([...store.state.each, ...runs]) });
      const view = store.state.view === "findings" ? (node >= 0 ? "graph" : "modules") : store.state.view;
      select({ module, node, site: -1, view: node >= 0 && view === "modules" ? "graph" : view });
    });
    link.append(
      h("span", { text: shorten(path, 70), dir: "auto" }),
      h("span", { class: "dim", text: ` ${shorten(note, 40)}` }),
    );
    return link;
  }

  /** Gives the view free, and the keys to it. */
  private close(): void {
    (document.activeElement as HTMLElement | null)?.blur();
    this.results.hidden = true;
  }

  private onKey(event: KeyboardEvent): void {
    const chooses = event.key === "Enter" || event.key === "ArrowDown";
    if (chooses && event.target === this.box && this.box.value !== this.context.store.state.query) {
      this.ask(); // who types fast does not choose from what was found for half a word
      this.update();
    }
    const links = [...this.results.querySelectorAll("button")];
    const at = links.indexOf(document.activeElement as HTMLButtonElement);
    if (event.key === "ArrowDown") (links[at + 1] ?? links[at])?.focus();
    else if (event.key === "ArrowUp") (at > 0 ? links[at - 1] : this.box).focus();
    else if (event.key === "Enter" && at < 0) links[0]?.click();
    else if (event.key === "Escape") this.close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
