// Which numbers the colours span: the whole map, the part in view, each row its own, or two that were written.

import { fixedScale, makeScale, rangeOf, type Scale } from "../scale";
import type { Grid } from "./grid";

export type Colouring = "all" | "view" | "row" | "fixed";

export function colouringOf(text: string | undefined): { mode: Colouring; low: number; high: number } {
  const fixed = /^(-?[\d.e+-]+):(-?[\d.e+-]+)$/i.exec(text ?? "");
  const [low, high] = [Number(fixed?.[1]), Number(fixed?.[2])];
  if (fixed && high > low) return { mode: "fixed", low, high };
  return { mode: text === "view" || text === "row" ? text : "all", low: NaN, high: NaN };
}

export function scalesOf(grid: Grid, text: string | undefined, log: boolean, dark: boolean): (row: number) => Scale {
  const { mode, low, high } = colouringOf(text);
  if (mode === "row") {
    const made: Scale[] = [];
    return (row) => (made[row] ??= rowScale(grid, row, log, dark));
  }
  const scale = mode === "fixed" ? fixedScale(low, high, log, dark) : makeScale(mode === "view" ? rangeOf(grid.low, grid.high) : grid.facts.range, log, dark);
  return () => scale;
}

function rowScale(grid: Grid, row: number, log: boolean, dark: boolean): Scale {
  const from = row * grid.columns;
  return makeScale(rangeOf(grid.low.subarray(from, from + grid.columns), grid.high.subarray(from, from + grid.columns)), log, dark);
}
