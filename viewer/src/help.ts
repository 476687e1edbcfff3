/** The list of keys and of what the search understands. */

import { button, h, textTable } from "./dom";

const KEYS = [
  ["/", "search"],
  ["1 to 5", "findings, modules, graph, timeline, values"],
  ["space", "fit the graph or the timeline into the view"],
  ["arrows", "move along rows, along the lines of the graph, along spans, or over the steps"],
  ["e, c", "expand, collapse the selected group"],
  ["E, C", "expand everything (in the graph, in the selected group), collapse everything"],
  ["+, -", "zoom"],
  ["drag with shift", "select a range of the timeline, whose times are summed up below"],
  ["p", "pin the selected tensor in the values"],
  ["t", "show the view as a table"],
  ["?", "this list"],
  ["Escape", "close, or select nothing"],
];
const QUERIES = [
  ["attn", "modules and ops with this in their path, name or type"],
  ["op:linear", "ops by name; * stands for anything"],
  ["path:layers.*.attn", "by module path"],
  ["dtype:bf16", "by the text of any column: type, phase, kind, shape ..."],
  ["time>1ms  parameters>=1m", "by the number of any column, with a unit"],
  ["nan", "where values are not finite"],
  ["-relu", "not this; several words must all hold"],
];

const SIGNS = [
  ["★NaN↓", "full: NaN came up here, in forward; without the star: inside"],
  ["inf↑", "outlined: infinite values came from elsewhere, in backward"],
  ["×4", "a row for 4 equal modules: Σ is their sum, max the largest, all over the elements of all"],
  ["saved for backward", "memory that ops of the module and inside it keep until backward"],
  ["saved, own ops", "the same without what is inside the module"],
];

export function showHelp(): void {
  const close = button("Close", "Close this list", () => {
    dialog.close();
  });
  const dialog = h(
    "dialog",
    { class: "sheet", "aria-label": "Keys" },
    close,
    textTable("Keys", ["key", "what it does"], KEYS),
    textTable("Signs and words", ["sign", "what it says"], SIGNS),
    textTable("Search", ["words", "what they find"], QUERIES),
  );
  dialog.addEventListener("close", () => {
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
