// From a statistic's value to a place on a colour map, linear or logarithmic, one-sided or around zero.

import { diverging, sequential } from "./colour";

export interface Range {
  quantiles: number[] | null; // of 0, 1, 5, 50, 95, 99 and 100 per cent
  positive: number[] | null; // the same of the values above zero
}

export interface Scale {
  place(value: number): number; // 0..1
  value(place: number): number;
  lut: Uint8Array;
  low: number;
  high: number;
  clipped: boolean; // some values lie beyond the ends
}

const LOGARITHMIC = new Set(["std", "absmax", "l1", "l2", "rms", "grad/weight", "nans", "infs", "nonfinite"]);
export const usualScale = (statistic: string): "log" | "linear" => (LOGARITHMIC.has(statistic) || /norm|ratio/.test(statistic) ? "log" : "linear");

export function makeScale(range: Range, log: boolean, dark: boolean): Scale {
  const q = range.quantiles ?? [0, 0, 0, 0.5, 1, 1, 1];
  const [least = 0, q1 = 0, , , , q99 = 1, greatest = 1] = q;
  const signed = least < 0 && greatest > 0;
  if (signed || least < 0) return around(q, log, dark);
  if (log && greatest > 0) {
    const [p0 = greatest / 10, p1 = p0, , , , p99 = greatest, p100 = greatest] = range.positive ?? [];
    // A few values of another world (an explosion, a dead layer) must not take all the colours.
    const clipped = Math.log(p100 / p0) > 2.2 * Math.log(p99 / p1) + 2;
    const high = clipped ? p99 : p100;
    const low = Math.min(clipped ? p1 : p0, high / 10);
    const from = Math.log(low);
    const span = Math.log(high) - from;
    return {
      place: (v) => (v <= low ? 0 : Math.min(1, (Math.log(v) - from) / span)),
      value: (p) => Math.exp(from + p * span),
      lut: sequential, low, high, clipped,
    };
  }
  // One spike must not flatten everything else; it keeps the end's colour.
  const clipped = greatest - least > 4 * (q99 - q1) && q99 > q1;
  const low = clipped ? q1 : least;
  let high = clipped ? q99 : greatest;
  if (!(high > low)) high = low + (Math.abs(low) || 1);
  return {
    place: (v) => Math.min(1, Math.max(0, (v - low) / (high - low))),
    value: (p) => low + p * (high - low),
    lut: sequential, low, high, clipped,
  };
}

function around(q: number[], log: boolean, dark: boolean): Scale {
  const [least = 0, q1 = 0, q5 = 0, , q95 = 0, q99 = 0, greatest = 0] = q;
  const outermost = Math.max(Math.abs(least), Math.abs(greatest)) || 1;
  const usual = Math.max(Math.abs(q1), Math.abs(q99)) || outermost;
  const clipped = !log && outermost > 4 * usual;
  const end = clipped ? usual : outermost;
  const knee = Math.max(Math.min(Math.abs(q5), Math.abs(q95)) || end * 1e-3, end * 1e-6);
  const bend = (v: number) => (log ? Math.sign(v) * Math.log1p(Math.abs(v) / knee) : v);
  const unbend = (w: number) => (log ? Math.sign(w) * Math.expm1(Math.abs(w)) * knee : w);
  const top = bend(end);
  return {
    place: (v) => Math.min(1, Math.max(0, 0.5 + bend(v) / top / 2)),
    value: (p) => unbend((2 * p - 1) * top),
    lut: diverging(dark), low: -end, high: end, clipped,
  };
}

// The range of some numbers, as the server tells it of a whole map.
export function rangeOf(...parts: ArrayLike<number>[]): Range {
  const finite: number[] = [];
  const total = parts.reduce((sum, part) => sum + part.length, 0);
  const stride = Math.max(1, Math.floor(total / 40_000));
  let least = Infinity;
  let greatest = -Infinity;
  for (const part of parts) {
    for (let i = 0; i < part.length; i++) {
      const v = part[i] ?? NaN;
      if (!Number.isFinite(v)) continue;
      if (v < least) least = v;
      if (v > greatest) greatest = v;
      if (i % stride === 0) finite.push(v);
    }
  }
  const quantiles = (values: number[], low: number, high: number): number[] | null => {
    if (values.length === 0) return null;
    values.sort((a, b) => a - b);
    const found = [0, 0.01, 0.05, 0.5, 0.95, 0.99, 1].map((q) => values[Math.round(q * (values.length - 1))] ?? 0);
    found[0] = Math.min(found[0] ?? low, low);
    found[6] = Math.max(found[6] ?? high, high);
    return found;
  };
  const above = finite.filter((v) => v > 0);
  return { quantiles: quantiles(finite, least, greatest), positive: quantiles(above, least > 0 ? least : Infinity, greatest) };
}

// Colours between two numbers that somebody wrote.
export function fixedScale(low: number, high: number, log: boolean, dark: boolean): Scale {
  const seven = [low, low, low, (low + high) / 2, high, high, high];
  return { ...makeScale({ quantiles: seven, positive: low > 0 ? seven : [high / 1e6, high / 1e6, high / 1e6, high / 1e3, high, high, high] }, log, dark), clipped: true };
}
