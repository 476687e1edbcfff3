/** The colours of the page for drawings, read from the style, where light and dark are told apart. */

export interface Theme {
  background: string;
  panel: string;
  text: string;
  dim: string;
  line: string;
  accent: string;
  bad: string;
  box: string;
  gradients: string;
  follows: string;
  reshaped: string;
  changed: string;
  inside: string;
  onlyA: string;
  onlyB: string;
  less: string;
  lesser: string;
  same: string;
  greater: string;
  more: string;
}

const NAMES = [
  "background",
  "panel",
  "text",
  "dim",
  "line",
  "accent",
  "bad",
  "box",
  "gradients",
  "follows",
  "reshaped",
  "changed",
  "inside",
  "onlyA",
  "onlyB",
  "less",
  "lesser",
  "same",
  "greater",
  "more",
] as const;
let theme: Theme | null = null;

export function readTheme(): Theme {
  if (!theme) {
    const style = getComputedStyle(document.documentElement);
    theme = Object.fromEntries(
      NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
    ) as unknown as Theme;
  }
  return theme;
}

export function chooseTheme(choice: "auto" | "light" | "dark"): void {
  document.documentElement.dataset.theme = choice;
  theme = null;
}

export function forgetTheme(): void {
  theme = null;
}

export function movesLess(): boolean {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
