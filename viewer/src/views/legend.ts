/** The choice of what colours show, and its legend with units. */

import type { Context } from "../context";
import { WIDEST_RATIO } from "../colors";
import { verdictSign } from "../difference";
import { h, replaceChildren, select } from "../dom";
import type { ViewName } from "../state";

const STOPS = 24;
/** The views that are coloured; the others have colours of their own. */
const COLORED: readonly ViewName[] = ["graph", "timeline"];

export class Legend {
  readonly element = h("div", { class: "legend" });
  private readonly key = h("div", { class: "key" });

  constructor(private readonly context: Context) {
    const choices = context.overlays.choices.map(({ key, label, group }) => ({
      value: key,
      text: label,
      group,
    }));
    choices.unshift({ value: "", text: "nothing", group: "" });
    const chooser = select("Colour", choices, context.store.state.overlay, (overlay) => {
      context.store.update({ overlay });
    });
    this.element.append(chooser, this.key);
  }

  update(): void {
    const { overlay, store } = this.context;
    const chooser = this.element.querySelector("select")!;
    chooser.value = overlay ? store.state.overlay : "";
    chooser.disabled = !COLORED.includes(store.state.view);
    chooser.title = chooser.disabled ? "Only the graph and the timeline are coloured by a choice" : "";
    this.key.hidden = chooser.disabled;
    this.key.title = overlay?.choice.about ?? "";
    if (!overlay) this.key.replaceChildren();
    else if (overlay.isKinds) this.drawKinds();
    else this.drawRamp();
  }

  private drawKinds(): void {
    const overlay = this.context.overlay!;
    const used = new Set([...overlay.modules, ...overlay.nodes].filter((value) => !Number.isNaN(value)));
    if (overlay.isVerdict && [...used].every((value) => overlay.kinds[value] === "equal")) {
      replaceChildren(this.key, h("span", { text: "nothing differs" }));
      return;
    }
    replaceChildren(
      this.key,
      ...[...used]
        .sort((a, b) => (overlay.isVerdict ? a - b : 0))
        .slice(0, 8)
        .map((value) => {
          const box = h("i", { class: "box" });
          box.style.backgroundColor = overlay.color(value);
          const name = overlay.kinds[value];
          const sign = overlay.isVerdict ? verdictSign(name) : "";
          return h("span", {}, box, h("span", { text: sign ? `${sign} ${name}` : name }));
        }),
    );
  }

  private drawRamp(): void {
    const overlay = this.context.overlay!;
    const { scale } = overlay;
    const colors = Array.from({ length: STOPS }, (_, at) => scale.color(scale.at(at / (STOPS - 1))));
    const ramp = h("i", {
      class: "ramp",
      role: "img",
      "aria-label": `From ${overlay.text(scale.low)} to ${overlay.text(scale.high)}`,
    });
    ramp.style.backgroundImage = `linear-gradient(to right, ${colors.join(",")})`;
    if (scale.kind === "log" || scale.kind === "ratio") this.key.title += " Colours by the logarithm.";
    const isRatio = scale.kind === "ratio";
    const { isNoise } = overlay;
    if (isNoise === "all") {
      replaceChildren(this.key, h("span", { text: "times of too few steps to tell noise: no colour" }));
      return;
    }
    const [most, least] = isRatio && scale.high === WIDEST_RATIO ? ["≥ ", "≤ "] : ["", ""];
    replaceChildren(
      this.key,
      h("span", { text: (isRatio ? `B less ${least}` : "") + overlay.text(scale.low) }),
      ramp,
      h("span", { text: isRatio ? `${most}${overlay.text(scale.high)} B more` : overlay.text(scale.high) }),
      isNoise === "partly" ? h("span", { text: "no colour: noise, by each one's own steps" }) : null,
    );
  }
}
