/** Leads the lines of a level: down its column to the next row, or past other rows by a channel on the left. */

import { type Positions, ROW_GAP, TITLE } from "./layout";
import { IN, type Level, OUT } from "./levels";

/** Where more lines than this pass other rows on their way in or out, they are drawn as their ends. */
const MOST_PASSING = 4;

/** The points of a line, within the owner of its level: down its column to the next row, or past others by a channel. */
export function route(level: Level, line: number, at: Positions, bands: Float64Array): number[] | null {
  const [from, to] = [level.from[line], level.to[line]];
  const isUp = from < 0 || to < 0 ? level.isFlipped : level.row[to] < level.row[from];
  const [source, target] = [from >= 0 ? level.items[from] : -1, to >= 0 ? level.items[to] : -1];
  const anchor = (node: number) => at.x[node] + Math.min(at.width[node] / 2, 26);
  const top = level.owner < 0 ? -20 : TITLE;
  const bottom = level.owner < 0 ? bands.at(-1)! + 20 : at.height[level.owner];
  const startY = from === IN ? (isUp ? bottom : top) : at.y[source] + (isUp ? 0 : at.height[source]);
  const endY = to === OUT ? (isUp ? top : bottom) : at.y[target] + (isUp ? at.height[target] : 0);
  const startX = from === IN ? anchor(target) : anchor(source);
  const endX = to === OUT ? anchor(source) : anchor(target);
  const channel = level.channel[line];
  if (channel >= 0 && (from < 0 || to < 0) && level.passing > MOST_PASSING)
    return routeStub(startX, endX, startY, endY, from === IN, isUp);
  if (channel < 0 && startX === endX) return [startX, startY, endX, endY];
  const fromRow = from === IN ? (isUp ? bands.length / 2 : -1) : level.row[from];
  const toRow = to === OUT ? (isUp ? -1 : bands.length / 2) : level.row[to];
  if (fromRow === toRow) return routeInRow(source, target, at);
  const gap = ROW_GAP * 0.42;
  // Beside a row is its gap: below it for a line that runs down, above it for one that runs up.
  const leave =
    fromRow < 0
      ? top + 4
      : fromRow >= bands.length / 2
        ? bottom - 4
        : isUp
          ? bands[fromRow * 2] - gap
          : bands[fromRow * 2 + 1] + gap;
  const arrive =
    toRow < 0
      ? top + 4
      : toRow >= bands.length / 2
        ? bottom - 4
        : isUp
          ? bands[toRow * 2 + 1] + gap
          : bands[toRow * 2] - gap;
  if (channel < 0) return [startX, startY, startX, arrive, endX, arrive, endX, endY];
  const x = 7 + channel * 7 - (level.owner < 0 ? 7 * (level.channels + 1) : 0);
  if (from === IN) return [x, startY, x, arrive, endX, arrive, endX, endY];
  if (to === OUT) return [startX, startY, startX, leave, x, leave, x, endY];
  return [startX, startY, startX, leave, x, leave, x, arrive, endX, arrive, endX, endY];
}

/** The end of a line that comes into a level or leaves it. */
function routeStub(
  startX: number,
  endX: number,
  startY: number,
  endY: number,
  isIn: boolean,
  isUp: boolean,
): number[] {
  const length = isUp ? -9 : 9;
  return isIn ? [endX, endY - length, endX, endY] : [startX, startY, startX, startY + length];
}

/** A line to a neighbour in the same row; none past others. */
function routeInRow(source: number, target: number, at: Positions): number[] | null {
  const isRight = at.x[target] > at.x[source];
  const start = at.x[source] + (isRight ? at.width[source] : 0);
  const end = at.x[target] + (isRight ? 0 : at.width[target]);
  const y = Math.max(at.y[source], at.y[target]) + 12;
  return Math.abs(end - start) < 60 && at.y[source] === at.y[target] ? [start, y, end, y] : null;
}
