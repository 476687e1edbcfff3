/** Saves the picture of a view as PNG or SVG. */

import type { Picture } from "./context";
import { CanvasPainter, SvgPainter } from "./painter";
import { readTheme } from "./theme";
import { fitCanvas } from "./views/canvas";

export function saveSvg(picture: Picture, name: string): void {
  const painter = new SvgPainter(picture.width, picture.height);
  painter.rect(0, 0, picture.width, picture.height, readTheme().background);
  picture.paint(painter);
  save(new Blob([String(painter)], { type: "image/svg+xml" }), `${name}.svg`);
}

export function savePng(picture: Picture, name: string): void {
  const canvas = document.createElement("canvas");
  const painter = new CanvasPainter(fitCanvas(canvas, picture.width, picture.height));
  painter.rect(0, 0, picture.width, picture.height, readTheme().background);
  picture.paint(painter);
  canvas.toBlob((blob) => {
    if (blob) save(blob, `${name}.png`);
  });
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
