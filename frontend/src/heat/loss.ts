// A logged value on the map's own time axis: one column of it for each column of cells.

import { show } from "../numbers";
import { ink } from "../theme";
import type { Pen } from "../take/svg";
import { siteWord } from "../words";
import type { Frame } from "./draw";
import type { Cells, Grid } from "./grid";

export class LossColumns {
  readonly name: string;
  readonly low: Float64Array;
  readonly high: Float64Array;
  readonly broken: Uint8Array;
  readonly gap: Uint8Array; // columns without any record, of the loss or of a site

  constructor(site: string, grid: Grid, steps: ArrayLike<number>, values: ArrayLike<number>) {
    this.name = siteWord(site);
    this.low = new Float64Array(grid.columns).fill(NaN);
    this.high = new Float64Array(grid.columns).fill(NaN);
    this.broken = new Uint8Array(grid.columns);
    this.gap = Uint8Array.from({ length: grid.columns }, (_, column) => Number(grid.emptyAt(column)));
    const first = grid.steps[0] ?? 0;
    const last = grid.lastStepOf(grid.columns - 1);
    for (let i = 0; i < steps.length; i++) {
      const step = steps[i] ?? 0;
      if (step < first || step > last) continue;
      const column = grid.columnAt(step);
      const value = values[i] ?? NaN;
      if (!Number.isFinite(value)) this.broken[column] = 1;
      else {
        const [low = NaN, high = NaN] = [this.low[column], this.high[column]];
        this.low[column] = Number.isNaN(low) ? value : Math.min(value, low);
        this.high[column] = Number.isNaN(high) ? value : Math.max(value, high);
      }
    }
  }

  text(column: number): string {
    const low = this.low[column] ?? NaN;
    const high = this.high[column] ?? NaN;
    const bad = this.broken[column] ? "NaN or inf" : "";
    if (Number.isNaN(low)) return bad || "not logged";
    return `${low === high ? show(low) : `${show(low)} to ${show(high)}`}${bad && `, ${bad}`}`;
  }

  // The ends of the axis over the shown columns; a few spikes do not take all of it.
  ends(cells: Cells): [number, number] | null {
    const there: number[] = [];
    for (let c = cells.left; c < cells.right; c++) for (const v of [this.low[c], this.high[c]]) if (v !== undefined && Number.isFinite(v)) there.push(v);
    if (there.length === 0) return null;
    there.sort((a, b) => a - b);
    const low = there[0] ?? 0;
    const q = there[Math.floor(0.97 * (there.length - 1))] ?? 0;
    const most = there[there.length - 1] ?? 0;
    return [low, most - low > 8 * (q - low) && q > low ? q : most];
  }
}

export function drawLoss(pen: Pen, frame: Frame, cells: Cells, loss: LossColumns, colour: string): void {
  if (!frame.lossHeight) return;
  const top = frame.top - frame.lossHeight - 8;
  const { left, cellsWidth, lossHeight: height } = frame;
  const width = cellsWidth / (cells.right - cells.left);
  pen.fillStyle = ink("--panel");
  pen.fillRect(left, top, cellsWidth, height);
  for (let c = cells.left; c < cells.right; c++) {
    if (!loss.broken[c]) continue;
    pen.fillStyle = ink("--bad-soft");
    pen.fillRect(left + (c - cells.left) * width, top, Math.max(2, width + 0.4), height);
    pen.fillStyle = ink("--bad");
    pen.fillRect(left + (c - cells.left) * width, top + height - 3, Math.max(2, width + 0.4), 3);
  }
  pen.textAlign = "left";
  pen.textBaseline = "bottom";
  pen.fillStyle = ink("--ink-2");
  pen.fillText(loss.name, left, top - 3);
  const ends = loss.ends(cells);
  if (!ends) return;
  const span = ends[1] - ends[0] || Math.abs(ends[0]) || 1;
  const y = (v: number) => top + height - 4 - Math.min(1, Math.max(0, (v - ends[0]) / span)) * (height - 8);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillStyle = ink("--ink-3");
  pen.fillText(show(ends[1]), left - 8, top + 6);
  if (ends[1] > ends[0]) pen.fillText(show(ends[0]), left - 8, top + height - 6);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.beginPath();
  let joined = false;
  for (let c = cells.left; c < cells.right; c++) {
    const low = loss.low[c] ?? NaN;
    const high = loss.high[c] ?? NaN;
    if (Number.isNaN(low)) {
      if (loss.broken[c] || loss.gap[c]) joined = false;
      continue;
    }
    const x = left + (c - cells.left + 0.5) * width;
    if (joined) pen.lineTo(x, y(high));
    else pen.moveTo(x, y(high));
    if (low !== high) pen.lineTo(x, y(low));
    joined = true;
  }
  pen.stroke();
}
