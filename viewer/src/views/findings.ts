/** What the recording's checks found, each with a link to its place; then what the recording is. */

import type { Context, TextTable, View } from "../context";
import { button, h } from "../dom";
import { shorten } from "../format";
import type { Finding } from "../payload";

export class FindingsView implements View {
  readonly element = h("section", { class: "view findings", "aria-label": "Findings" });

  constructor(private readonly context: Context) {
    const { payload } = this.context.model;
    const found = payload.findings.map((finding) => this.makeFinding(finding));
    const none = h("p", { class: "hint", text: "No check has found anything in this recording." });
    this.element.append(
      h("h2", { text: "Findings" }),
      ...(found.length ? found : [none]),
      ...lines("What the recording says of itself", payload.notes),
      ...lines("What this page could not show", payload.missing),
      h("h2", { text: "Recording" }),
      h(
        "dl",
        { class: "about" },
        ...payload.about.flatMap(([label, text]) => [
          h("dt", { text: label }),
          h("dd", { text: shorten(text, 2000), dir: "auto" }),
        ]),
      ),
    );
  }

  /** What was found does not depend on what is chosen. */
  update(): void {}

  private makeFinding(finding: Finding): HTMLElement {
    const { model, select } = this.context;
    const place =
      finding.node >= 0 ? model.nodePath(finding.node)
      : finding.module >= 0 ? model.modulePath(finding.module)
      : ""; // prettier-ignore
    const step = finding.step >= 0 ? `, ${model.stepName(finding.step)}` : "";
    const link = place
      ? button(`Show ${shorten(place, 80)}${step}`, `Select ${place.slice(0, 500)}${step}`, () => {
          const module =
            finding.module >= 0 ? finding.module : finding.node >= 0 ? model.moduleOfNode(finding.node) : -1;
          const { node } = finding;
          const view = node >= 0 ? "graph" : "modules";
          select({ module, node, site: -1, view, ...(finding.step >= 0 ? { step: finding.step } : {}) });
        })
      : null;
    return h(
      "article",
      {
        class: `finding ${["error", "warning", "good"].includes(finding.severity) ? finding.severity : "note"}`,
      },
      h("h3", { text: shorten(finding.title, 500), dir: "auto" }),
      h("pre", { tabindex: "0", text: shorten(finding.lines.join("\n"), 20_000), dir: "auto" }),
      link,
    );
  }

  table(): TextTable {
    const { findings } = this.context.model.payload;
    return {
      caption: "Findings",
      head: ["severity", "finding", "evidence"],
      body: findings.map(({ severity, title, lines }) => [severity, title, lines.join(" ")]),
    };
  }
}

function lines(title: string, texts: readonly string[]): HTMLElement[] {
  if (!texts.length) return [];
  return [
    h("h2", { text: title }),
    h("ul", {}, ...texts.map((text) => h("li", { text: shorten(text, 2000), dir: "auto" }))),
  ];
}
