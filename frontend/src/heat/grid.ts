// One answer of the server for the map, and how its cells lie under the part that is looked at.

import type { Packed } from "../wire";
import type { Range, Scale } from "../scale";
import { NOT_FINITE } from "../colour";

export interface MapFacts {
  run: string;
  statistic: string;
  rows: number; // of the whole map
  firstRow: number;
  shownRows: number;
  shownSteps: number;
  lastStep: number | null;
  revision: number;
  allSteps: number;
  sites: string[]; // under the shown rows, one after the other
  names: (string | null)[] | null; // of the shown rows, where a row is a module or a structure of leaves
  range: Range;
}

// The part of the map that is looked at: steps, both ends included; rows, the last not included.
export interface Part {
  from: number | null;
  to: number | null;
  top: number | null;
  bottom: number | null;
}

export interface Cells {
  left: number;
  right: number; // not included
  top: number;
  bottom: number; // not included
}

// Only the rows of one module, from an answer about the whole model: a report holds no other. Where rows were merged
// there is nothing to choose from, and the answer stays as it is.
export function within(packed: Packed<MapFacts>, module: string): Packed<MapFacts> {
  const { facts, arrays, shapes } = packed;
  const [rows = 0, columns = 0] = shapes["low"] ?? [];
  if (facts.names !== null || rows !== facts.sites.length) return packed;
  const inside = (site: string): boolean => {
    const path = site.slice(0, Math.max(0, site.lastIndexOf(":")));
    return path === module || path.startsWith(`${module}.`);
  };
  const kept = facts.sites.flatMap((site, row) => (inside(site) ? [row] : []));
  const pick = (name: string): Float32Array | undefined => {
    const from = arrays[name];
    if (!from) return undefined;
    const to = new Float32Array(kept.length * columns);
    kept.forEach((row, at) => to.set(from.subarray(row * columns, (row + 1) * columns), at * columns));
    return to;
  };
  const low = pick("low") ?? new Float32Array(0);
  const count = (n: number) => Int32Array.from({ length: n }, (_, i) => i);
  return {
    facts: { ...facts, rows: kept.length, shownRows: kept.length, sites: kept.map((row) => facts.sites[row] ?? "") },
    arrays: { ...arrays, low, high: pick("high") ?? low, rowStarts: count(kept.length), bandStarts: count(kept.length + 1) },
    shapes: { ...shapes, low: [kept.length, columns] },
  };
}

export class Grid {
  readonly columns: number;
  readonly rows: number;
  readonly low: Float32Array;
  readonly high: Float32Array;
  readonly steps: Float64Array;
  readonly rowStarts: Int32Array;
  readonly bandStarts: Int32Array; // where in facts.sites each shown row of the whole map begins
  readonly facts: MapFacts;
  private places: Map<string, number> | null = null;

  constructor(packed: Packed<MapFacts>) {
    this.facts = packed.facts;
    [this.rows = 0, this.columns = 0] = packed.shapes["low"] ?? [];
    this.low = packed.arrays["low"] as Float32Array;
    this.high = (packed.arrays["high"] ?? this.low) as Float32Array;
    this.steps = packed.arrays["steps"] as Float64Array;
    this.rowStarts = packed.arrays["rowStarts"] as Int32Array;
    this.bandStarts = packed.arrays["bandStarts"] as Int32Array;
  }

  private get positions(): Map<string, number> {
    this.places ??= new Map(this.facts.sites.map((site, at) => [site, at]));
    return this.places;
  }

  get empty(): boolean {
    return this.rows === 0 || this.columns === 0;
  }

  emptyAt(column: number): boolean {
    for (let row = 0; row < this.rows; row++) if (!Number.isNaN(this.low[row * this.columns + column] ?? NaN)) return false;
    return true;
  }

  columnAt(step: number): number {
    let low = 0;
    let high = this.columns - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((this.steps[middle] ?? 0) <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The row that holds the n-th site of the whole map.
  rowAt(index: number): number {
    const wanted = index - this.facts.firstRow;
    let row = 0;
    while (row + 1 < this.rows && (this.rowStarts[row + 1] ?? 0) <= wanted) row++;
    return row;
  }

  private bandsOf(row: number): [number, number] {
    return [this.rowStarts[row] ?? 0, row + 1 < this.rows ? this.rowStarts[row + 1] ?? 0 : this.facts.shownRows];
  }

  // The sites under a row of the grid.
  sitesOf(row: number): string[] {
    const [from, to] = this.bandsOf(row);
    return this.facts.sites.slice(this.bandStarts[from] ?? 0, this.bandStarts[to] ?? 0);
  }

  // What a row is: a module where rows are folded, else nothing.
  moduleOf(row: number): string | null {
    return this.facts.names?.[this.rowStarts[row] ?? 0] ?? null;
  }

  // The row of the whole map that holds a site, if it is among the shown ones.
  placeOf(site: string): number | null {
    const at = this.positions.get(site);
    if (at === undefined) return null;
    let low = 0;
    let high = this.facts.shownRows - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((this.bandStarts[middle] ?? 0) <= at) low = middle;
      else high = middle - 1;
    }
    return this.facts.firstRow + low;
  }

  lastStepOf(column: number): number {
    return column + 1 < this.columns ? (this.steps[column + 1] ?? 0) - 1 : this.facts.lastStep ?? 0;
  }

  // The cells under a part; the whole answer if the part is what was asked for.
  under(part: Part): Cells {
    const left = part.from === null ? 0 : this.columnAt(part.from);
    const right = part.to === null ? this.columns : this.columnAt(part.to) + 1;
    const top = part.top === null ? 0 : this.rowAt(part.top);
    const bottom = part.bottom === null ? this.rows : this.rowAt(Math.max(part.top ?? 0, part.bottom - 1)) + 1;
    return { left, right: Math.max(left + 1, right), top, bottom: Math.max(top + 1, bottom) };
  }

  // Of a cell's least and greatest value the one that is further from the usual: a spike up or down shows.
  value(row: number, column: number, usual: number, scale: Scale): number {
    const at = row * this.columns + column;
    const low = this.low[at] ?? NaN;
    const high = this.high[at] ?? NaN;
    if (low === high) return low;
    return scale.place(high) - usual >= usual - scale.place(low) ? high : low;
  }

  usual(scale: Scale): number {
    return scale.place(this.facts.range.quantiles?.[3] ?? 0);
  }
}

// The grid as an image, one pixel a cell. What was not recorded stays transparent.
export function paint(grid: Grid, bad: Grid | null, scaleOf: (row: number) => Scale): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, grid.columns);
  canvas.height = Math.max(1, grid.rows);
  const context = canvas.getContext("2d");
  if (!context || grid.empty) return canvas;
  const image = context.createImageData(grid.columns, grid.rows);
  const pixels = image.data;
  const fits = bad !== null && bad.rows === grid.rows && bad.columns === grid.columns;
  for (let row = 0, at = 0; row < grid.rows; row++) {
    const scale = scaleOf(row);
    const usual = grid.usual(scale);
    for (let column = 0; column < grid.columns; column++, at++) {
      const value = grid.value(row, column, usual, scale);
      const broken = (fits && (bad.high[at] ?? 0) > 0) || value === Infinity || value === -Infinity;
      if (Number.isNaN(value) && !broken) continue;
      if (broken) {
        pixels[at * 4] = NOT_FINITE[0];
        pixels[at * 4 + 1] = NOT_FINITE[1];
        pixels[at * 4 + 2] = NOT_FINITE[2];
      } else {
        const i = Math.round(scale.place(value) * 255) * 3;
        pixels[at * 4] = scale.lut[i] ?? 0;
        pixels[at * 4 + 1] = scale.lut[i + 1] ?? 0;
        pixels[at * 4 + 2] = scale.lut[i + 2] ?? 0;
      }
      pixels[at * 4 + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
