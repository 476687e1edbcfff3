/** Colours for values, which people who do not see all colours can tell apart. */

import { readTheme, type Theme } from "./theme";

/** From low to high: the colours of viridis, which grow brighter evenly. */
const SEQUENTIAL = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"];
/** From negative over 0 to positive. */
const DIVERGING = ["#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"];
/** Kinds: the colours of Okabe and Ito. */
const KINDS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
/** Values without a number. */
export const NONFINITE = "#d7263d";

type Rgb = [number, number, number];

function parse(color: string): Rgb {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) as Rgb;
}

function makeRamp(colors: readonly string[], steps = 64): string[] {
  const stops = colors.map(parse);
  return Array.from({ length: steps }, (_, step) => {
    const at = (step / (steps - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[low].map((value, channel) => value + (stops[low + 1][channel] - value) * (at - low));
    return `#${mixed.map((value) => Math.round(value).toString(16).padStart(2, "0")).join("")}`;
  });
}

const RAMPS = { sequential: makeRamp(SEQUENTIAL), diverging: makeRamp(DIVERGING) };

let ratios: { theme: Theme; ramp: string[] } | null = null;

/** The colour of a ratio, from far less at 0 over the same to far more at 1; the same is the colour of the ground. */
function ratioColor(place: number): string {
  const theme = readTheme();
  if (ratios?.theme !== theme) {
    const { less, lesser, same, greater, more } = theme;
    ratios = { theme, ramp: makeRamp([less, lesser, same, greater, more], 65) };
  }
  return ratios.ramp[Math.round(place * 64)];
}

export function kindColor(index: number): string {
  return KINDS[index % KINDS.length];
}

/** The luminance on which black and white have the same contrast, of 4.58; so one of them has 4.5 on each colour. */
const EQUAL_CONTRAST = 0.179;

/** The relative luminance of a colour, as WCAG 2 defines it. */
export function luminance(color: string): number {
  const [red, green, blue] = parse(color).map((value) =>
    value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

const textColors = new Map<string, string>();

/** Black or white, whichever is read better on a colour. */
export function textOn(color: string): string {
  let found = textColors.get(color);
  if (found === undefined) {
    found = luminance(color) > EQUAL_CONTRAST ? "#000000" : "#ffffff";
    textColors.set(color, found);
  }
  return found;
}

/** The least, the least above 0 (infinity for none) and the greatest of the finite values; 0 if there are none. */
export function findRange(...lists: ArrayLike<number>[]): { low: number; least: number; high: number } {
  let [low, least, high] = [Infinity, Infinity, -Infinity];
  for (const values of lists)
    for (let at = 0; at < values.length; at++) {
      const value = values[at];
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
      if (value > 0 && value < least) least = value;
    }
  return low <= high ? { low, least, high } : { low: 0, least, high: 0 };
}

/** The greatest ratio that has a colour of its own. */
export const WIDEST_RATIO = 10;

/** Gives values their place between the least and the greatest, and their colour. */
export class Scale {
  readonly kind: "linear" | "log" | "diverging" | "ratio";
  readonly low: number;
  readonly high: number;

  /**
   * Takes the range of the finite values. Magnitudes whose range is more than `widest` are drawn by their logarithm, and
   * ratios by how far they are from 1: at least to twice and half, at most to ten times and a tenth.
   */
  constructor(values: readonly ArrayLike<number>[], widest = 1000, isRatio = false) {
    const { low, least, high } = findRange(...values);
    if (isRatio) {
      this.kind = "ratio";
      this.high = Math.min(WIDEST_RATIO, Math.max(2, high, least < Infinity ? 1 / least : 2));
      this.low = 1 / this.high;
    } else if (low < 0) {
      this.kind = "diverging";
      this.high = Math.max(-low, high);
      this.low = -this.high;
    } else if (least < Infinity && high / least > widest) {
      this.kind = "log";
      this.low = Math.max(least, high * 1e-12);
      this.high = high;
    } else {
      this.kind = "linear";
      this.low = low > high * 0.5 && low < high && low > 0 ? low : Math.min(low, 0);
      this.high = high;
    }
  }

  /** Where a value lies between the ends of the scale, from 0 to 1. */
  place(value: number): number {
    if (value === Infinity) return 1;
    if (value === -Infinity) return 0;
    if (this.high === this.low) return value === 0 && this.kind !== "diverging" ? 0 : 0.5;
    const place =
      this.kind === "log" || this.kind === "ratio"
        ? Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low)
        : (value - this.low) / (this.high - this.low);
    return Math.min(1, Math.max(0, place));
  }

  color(value: number): string {
    if (this.kind === "ratio") return ratioColor(this.place(value));
    if (!Number.isFinite(value)) return NONFINITE;
    const ramp = this.kind === "diverging" ? RAMPS.diverging : RAMPS.sequential;
    return ramp[Math.round(this.place(value) * (ramp.length - 1))];
  }

  /** The value at a place between the ends. */
  at(place: number): number {
    if (this.kind === "log" || this.kind === "ratio") return this.low * (this.high / this.low) ** place;
    return this.low + (this.high - this.low) * place;
  }
}
