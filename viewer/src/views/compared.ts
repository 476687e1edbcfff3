/** The line above the views of two runs: where they part, and the modules that differ by themselves. */

import type { Context } from "../context";
import { verdictColor, verdictSign } from "../difference";
import { button, h } from "../dom";
import { shorten } from "../format";
import type { Model } from "../model";

const MOST = 6;
/** How many lines of the evidence are shown; the findings have all. */
const LINES = 2;

export class ComparedBar {
  readonly element: HTMLElement;

  constructor(private readonly context: Context) {
    const { model } = context;
    const { compared, findings } = model.payload;
    const [one, other] = compared?.names ?? ["", ""];
    const finding = findings[compared?.finding ?? -1];
    const title = finding?.title ?? "The runs were not compared in this step.";
    this.element = h(
      "section",
      { class: `compared ${finding?.severity ?? ""}`, "aria-label": "Difference of two runs", hidden: !compared },
      h("p", { class: "runs" }, ...nameRun("A", "first run", one), ...nameRun("B", "second run", other)),
      h("p", { class: "answer" }, h("strong", { text: shorten(title, 300), dir: "auto" }), this.linkFirst()),
      h("p", { class: "dim", text: (finding?.lines ?? []).slice(0, LINES).map((line) => line.trim()).join("; ") }),
      compared?.advice ? h("p", { text: compared.advice }) : null,
      this.listChanged(),
      this.explainNames(),
    ); // prettier-ignore
  }

  /** Says how a module is written that has another name in the second run; null if none has. */
  private explainNames(): HTMLElement | null {
    const { model } = this.context;
    const row = Array.from(model.modules.order).findLast((each) => model.otherName("modules", each));
    if (row === undefined) return null;
    const [name, other] = [model.moduleName(row), model.otherName("modules", row)].map((text) =>
      shorten(text, 40),
    );
    return h("p", {
      class: "dim",
      text: `${name} = ${other}: it is called ${name} in A and ${other} in B`,
    });
  }

  /** Leads to the place where the runs part. */
  private linkFirst(): HTMLElement | null {
    const { model, select } = this.context;
    const first = firstOf(model);
    if (!first) return null;
    return button("Show", "Select the first place where the runs differ", () => {
      select({ ...first, site: -1, view: first.node >= 0 ? "graph" : "modules" });
    });
  }

  /** Names the modules that differ by themselves, each with a link. */
  private listChanged(): HTMLElement | null {
    const { model, select } = this.context;
    const rows = listChanged(model);
    if (!rows.length) return null;
    const links = rows.slice(0, MOST).map((row) => {
      const verdict = model.difference("modules", row);
      const box = h("i", { class: "box" });
      box.style.backgroundColor = verdictColor(verdict);
      const name = `${verdictSign(verdict)} ${shorten(model.modulePath(row), 60)}`;
      const link = button(name, `${verdict}: select ${model.modulePath(row).slice(0, 500)}`, () => {
        select({ module: row, node: -1, site: -1 });
      });
      link.prepend(box);
      const other = model.second("modules", "path")?.text(row) ?? "";
      const isNamed = other && !verdict.startsWith("only");
      const about = isNamed ? ` ${verdict}, in B ${shorten(other, 60)}` : ` ${verdict}`;
      return h("li", {}, link, h("span", { class: "dim", text: about }));
    });
    const rest = rows.length - links.length;
    if (rest > 0) links.push(h("li", { class: "dim", text: `and ${rest} more` }));
    return h("ul", {}, ...links);
  }
}

function nameRun(letter: string, nth: string, name: string): HTMLElement[] {
  return [
    h("b", { text: `${letter} (${nth})` }),
    h("span", { text: shorten(name, 60), title: `${letter} is the ${nth}: ${name}`, dir: "auto" }),
  ];
}

/** The place where the runs part; null if they do not, or not in the shown step. */
export function firstOf({ payload }: Model): { module: number; node: number } | null {
  const finding = payload.findings[payload.compared?.finding ?? -1];
  if (!finding || (finding.module < 0 && finding.node < 0)) return null;
  const { module, node } = finding;
  return { module: module < 0 && node >= 0 ? payload.tables.nodes.link("module", node) : module, node };
}

/** The single modules that are changed, and the outermost ones that only one run has. */
function listChanged(model: Model): number[] {
  const { modules } = model;
  const found = Array.from(modules.order).filter((row) => {
    const verdict = model.difference("modules", row);
    if (!verdictSign(verdict) || model.hasMembers(row) || modules.table.number("count", row) > 1)
      return false;
    return !verdict.startsWith("only") || model.difference("modules", modules.parent[row]) !== verdict;
  });
  const isAlone = (row: number) => Number(model.difference("modules", row).startsWith("only"));
  return found.sort((a, b) => isAlone(b) - isAlone(a));
}
