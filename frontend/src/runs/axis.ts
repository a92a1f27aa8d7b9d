// A column of the table as an axis: numbers on a linear or logarithmic scale, words side by side.

import { logTicks, show, ticks } from "../numbers";
import type { RunLine } from "../types";
import { fact } from "./filter";

export interface Axis {
  place: (run: RunLine) => number; // 0 to 1; NaN for what is not finite, null is "not logged"
  has: (run: RunLine) => boolean;
  ticks: { at: number; text: string }[];
  log: boolean;
}

const WIDE = 100; // the ratio of greatest to least from which on a scale is logarithmic

export function axisOf(runs: RunLine[], value: (run: RunLine) => unknown, about = 6): Axis {
  const found = runs.map(value).filter((v) => v !== null && v !== undefined && v !== "");
  const has = (run: RunLine) => { const v = value(run); return v !== null && v !== undefined && v !== ""; };
  if (found.some((v) => typeof v !== "number")) {
    const words = [...new Set(found.map(String))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const at = (word: string) => (words.indexOf(word) + 0.5) / words.length;
    return { place: (run) => at(String(value(run))), has, log: false, ticks: words.slice(0, 40).map((text) => ({ at: at(text), text })) };
  }
  const numbers = (found as number[]).filter(Number.isFinite);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const log = low > 0 && high / low > WIDE;
  const bend = (v: number) => (log ? Math.log(v) : v);
  const span = bend(high) - bend(low);
  const at = (v: number) => (span > 0 ? (bend(v) - bend(low)) / span : 0.5);
  const places = numbers.length === 0 ? [] : span > 0 ? (log ? logTicks : ticks)(low, high, about) : [low];
  return { place: (run) => { const v = Number(value(run)); return Number.isFinite(v) ? at(v) : NaN; }, has, log, ticks: places.map((v) => ({ at: at(v), text: show(v) })) };
}

export const columnAxis = (runs: RunLine[], key: string): Axis => axisOf(runs, (run) => fact(run, key));
