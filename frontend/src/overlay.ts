// Several series with steps of their own as lines over one axis.

import type { Line } from "./chart";

export interface Own {
  line: Omit<Line, "values">;
  at: ArrayLike<number>;
  values: ArrayLike<number>;
}

export function overlay(series: Own[]): { steps: number[]; lines: Line[] } {
  const steps = [...new Set(series.flatMap((s) => Array.from(s.at)))].filter(Number.isFinite).sort((a, b) => a - b);
  const place = new Map(steps.map((s, i) => [s, i]));
  const lines = series.map(({ line, at, values }): Line => {
    // An infinity marks a recorded value that is not finite: a gap. NaN means that this line has no such step.
    const spread = new Float64Array(steps.length).fill(NaN);
    for (let i = 0; i < at.length; i++) {
      const index = place.get(at[i] ?? NaN);
      const value = values[i] ?? NaN;
      if (index !== undefined) spread[index] = Number.isFinite(value) ? value : Infinity;
    }
    return { ...line, values: spread, sparse: true };
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
