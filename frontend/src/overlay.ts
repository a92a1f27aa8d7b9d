// Several series with steps of their own as lines over one axis.

import type { Line, Stretch } from "./chart";

export interface Own {
  line: Omit<Line, "values">;
  at: ArrayLike<number>;
  values: ArrayLike<number>;
  raw?: ArrayLike<number> | undefined;
  gaps?: [number, number][]; // on the axis
}

export function overlay(series: Own[]): { steps: number[]; lines: Line[] } {
  const steps = [...new Set(series.flatMap((s) => Array.from(s.at)))].filter(Number.isFinite).sort((a, b) => a - b);
  const place = new Map(steps.map((s, i) => [s, i]));
  const lines = series.map(({ line, at, values, raw, gaps }): Line => {
    const there = Uint8Array.from(steps, (s) => ((gaps ?? []).some(([a, b]) => s > a && s < b) ? 2 : 0)); // 2: its own records are missing
    const spread = (from: ArrayLike<number>): Float64Array => {
      const to = new Float64Array(steps.length).fill(NaN);
      for (let i = 0; i < at.length; i++) {
        const index = place.get(at[i] ?? NaN);
        if (index === undefined) continue;
        to[index] = from[i] ?? NaN;
        there[index] = 1;
      }
      return to;
    };
    return { ...line, values: spread(values), ...(raw ? { raw: spread(raw) } : {}), there };
  });
  return { steps, lines };
}

const quantile = (ordered: number[], q: number): number => ordered[Math.min(ordered.length - 1, Math.max(0, Math.round(q * (ordered.length - 1))))] ?? NaN;

// An axis on which the usual values can be read: a few spikes, or one run of many that diverged, do not take it all.
// null where everything fits anyway.
export function usualRange(lines: ArrayLike<number>[], log: boolean): [number, number] | null {
  const each = lines.map((values) => Array.from(values).filter((v) => Number.isFinite(v) && (!log || v > 0)).sort((a, b) => a - b)).filter((v) => v.length > 0);
  if (each.length === 0) return null;
  const lows = each.map((v) => quantile(v, 0.02)).sort((a, b) => a - b);
  const highs = each.map((v) => quantile(v, 0.98)).sort((a, b) => a - b);
  const middle = { low: quantile(lows, 0.5), high: quantile(highs, 0.5) };
  const bend = (v: number) => (log ? Math.log(v) : v);
  const span = Math.max(bend(middle.high) - bend(middle.low), log ? 0.1 : Math.abs(middle.high) * 1e-6 || 1e-12);
  const within = (low: number, high: number) => bend(high) <= bend(middle.high) + 4 * span && bend(low) >= bend(middle.low) - 4 * span;
  const kept = each.filter((v) => within(quantile(v, 0.02), quantile(v, 0.98)));
  const used = kept.length > 0 ? kept : each;
  let low = Math.min(...used.map((v) => quantile(v, 0.02)));
  let high = Math.max(...used.map((v) => quantile(v, 0.98)));
  // Whole ends where they are not far: only outliers are cut.
  const least = Math.min(...used.map((v) => v[0] ?? NaN));
  const most = Math.max(...used.map((v) => v[v.length - 1] ?? NaN));
  const room = Math.max(bend(high) - bend(low), log ? 0.1 : 1e-12);
  if (bend(most) - bend(high) < 0.6 * room) high = most;
  if (bend(low) - bend(least) < 0.6 * room) low = least;
  if (kept.length === each.length && low === least && high === most) return null;
  if (!(high > low)) return null;
  const pad = 0.05;
  return log ? [low / (high / low) ** pad, high * (high / low) ** pad] : [low - pad * (high - low), high + pad * (high - low)];
}

// Stretches of steps at which a line is not finite, with the line's name; of the few first lines that have any.
export function stretchesOf(series: Own[], named: boolean, lines = 3): Stretch[] {
  return series.map(({ line, at, values, raw }) => {
    const own = raw ?? values;
    const found: Stretch[] = [];
    for (let i = 0; i < at.length; i++) {
      if (Number.isFinite(own[i])) continue;
      const from = at[i] ?? 0;
      while (i + 1 < at.length && !Number.isFinite(own[i + 1])) i++;
      found.push(named ? [from, at[i] ?? from, line.label] : [from, at[i] ?? from]);
    }
    return found.slice(0, 100);
  }).filter((found) => found.length > 0).slice(0, lines).flat();
}

// The gaps of a run's steps as places on the axis.
export function gapsOn(at: ArrayLike<number>, steps: ArrayLike<number>, gaps: [number, number][]): [number, number][] {
  const place = new Map(Array.from(steps, (s, i) => [s, i]));
  return gaps.map(([a, b]): [number, number] => [at[place.get(a) ?? -1] ?? NaN, at[place.get(b) ?? -1] ?? NaN]).filter(([a, b]) => b > a);
}

// Gaps at which no line has a record: the chart shows them as a band.
export const sharedGaps = (series: Own[]): [number, number][] =>
  series.flatMap((s) => s.gaps ?? []).filter(([a, b]) => !series.some(({ at }) => Array.from(at).some((x) => x > a && x < b)));
