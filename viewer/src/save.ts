/** Saves the picture of a view as PNG or SVG. */

import type { Picture } from "./context";
import { CanvasPainter, SvgPainter } from "./painter";
import { readTheme } from "./theme";

/** Pixels of a PNG for each unit of the picture, and how many of them browsers draw along a side, and in all. */
const DENSITY = 2;
const MOST_LONG = 16_000;
const MOST_PIXELS = 2 ** 27;

/** Draws a picture as SVG, with the background of the page. */
export function drawSvg(picture: Picture): SvgPainter {
  const painter = new SvgPainter(picture.width, picture.height);
  painter.rect(0, 0, picture.width, picture.height, readTheme().background);
  picture.paint(painter);
  return painter;
}

export function saveSvg(picture: Picture, name: string): void {
  save(new Blob([String(drawSvg(picture))], { type: "image/svg+xml" }), `${name}.svg`);
}

/** Saves a PNG at twice the resolution, or at as much as the browser can draw; returns whether it was twice. */
export function savePng({ width, height, paint }: Picture, name: string): boolean {
  const most = Math.min(MOST_LONG / Math.max(width, height), Math.sqrt(MOST_PIXELS / (width * height)));
  const density = Math.min(DENSITY, most);
  const canvas = document.createElement("canvas");
  canvas.width = Math.floor(width * density);
  canvas.height = Math.floor(height * density);
  const context = canvas.getContext("2d")!;
  context.scale(density, density);
  const painter = new CanvasPainter(context);
  painter.rect(0, 0, width, height, readTheme().background);
  paint(painter);
  canvas.toBlob((blob) => {
    if (blob) save(blob, `${name}.png`);
  });
  return density === DENSITY;
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => {
    URL.revokeObjectURL(link.href);
  }, 10_000);
}
