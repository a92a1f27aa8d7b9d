// Drawing of the map: the cells, names on the left, steps below, and the two strips that follow the cross-hair.

import { grouped, show, ticks } from "../numbers";
import type { Scale } from "../scale";
import type { Pen } from "../take/svg";
import { ink } from "../theme";
import type { Cells, Grid } from "./grid";

export interface Frame {
  width: number;
  height: number;
  left: number; // where the cells begin
  top: number;
  lossHeight: number; // of the strip above the cells; 0: none
  cellsWidth: number;
  cellsHeight: number;
  stripWidth: number; // right of the cells; 0: no room
  stripHeight: number; // below them
}

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const AXIS = 22;
const GAP = 10;

export function frameFor(width: number, height: number, gutter: number, loss: boolean): Frame {
  const stripWidth = width > 860 ? 128 : 0;
  const stripHeight = height > 420 ? 96 : 0;
  const lossHeight = loss && height > 300 ? 64 : 0;
  const top = 18 + (lossHeight ? lossHeight + 22 : 0);
  const cellsWidth = Math.max(60, width - gutter - (stripWidth ? stripWidth + GAP : 4));
  const cellsHeight = Math.max(60, height - top - AXIS - (stripHeight ? stripHeight + GAP + 16 : 0));
  return { width, height, left: gutter, top, lossHeight, cellsWidth, cellsHeight, stripWidth, stripHeight };
}

export function context2d(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  context?.clearRect(0, 0, width, height);
  if (context) context.font = FONT;
  return context;
}

// Long names lose their middle: the ends tell the layer and the kind.
export function shorten(context: Pen, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  let keep = text.length - 1;
  while (keep > 3) {
    const head = Math.ceil(keep / 3);
    const cut = `${text.slice(0, head)}…${text.slice(text.length - (keep - head))}`;
    if (context.measureText(cut).width <= room) return cut;
    keep--;
  }
  return "…";
}

export function drawCells(context: Pen, frame: Frame, picture: HTMLCanvasElement, cells: Cells): void {
  const { left, top, cellsWidth, cellsHeight } = frame;
  // What was not recorded: a quiet hatch that no colour map has.
  context.fillStyle = ink("--absent");
  context.fillRect(left, top, cellsWidth, cellsHeight);
  context.save();
  context.beginPath();
  context.rect(left, top, cellsWidth, cellsHeight);
  context.clip();
  context.strokeStyle = ink("--absent-line");
  context.lineWidth = 1;
  context.beginPath();
  for (let x = left - cellsHeight; x < left + cellsWidth; x += 7) {
    context.moveTo(x, top + cellsHeight);
    context.lineTo(x + cellsHeight, top);
  }
  context.stroke();
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, cells.left, cells.top, cells.right - cells.left, cells.bottom - cells.top, left, top, cellsWidth, cellsHeight);
  context.restore();
}

export function drawNames(context: Pen, frame: Frame, names: string[], cells: Cells): void {
  const rows = cells.bottom - cells.top;
  const height = frame.cellsHeight / rows;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = ink("--ink-2");
  // Where there is no room for all names, outer modules come first.
  const order = Array.from({ length: rows }, (_, i) => i + cells.top);
  if (height < 12) order.sort((a, b) => depth(names[a]) - depth(names[b]) || a - b);
  const taken: number[] = [];
  for (const row of order) {
    const y = frame.top + (row - cells.top + 0.5) * height;
    if (taken.some((other) => Math.abs(other - y) < 12)) continue;
    taken.push(y);
    context.fillText(shorten(context, names[row] ?? "", frame.left - 14), frame.left - 8, y);
  }
}

const depth = (name: string | undefined): number => (name ?? "").split(/[.:]/).length;

export function drawSteps(context: Pen, frame: Frame, grid: Grid, cells: Cells, label = true): void {
  const { left, top, cellsWidth, cellsHeight } = frame;
  const first = grid.steps[cells.left] ?? 0;
  const last = grid.lastStepOf(cells.right - 1);
  context.fillStyle = ink("--ink-2");
  context.strokeStyle = ink("--line");
  context.textBaseline = "top";
  const bottom = top + cellsHeight;
  const width = cellsWidth / (cells.right - cells.left);
  let free = left - 20;
  for (const tick of ticks(first, last, Math.max(2, cellsWidth / 110))) {
    if (tick !== Math.round(tick)) continue;
    const x = left + (grid.columnAt(tick) - cells.left + 0.5) * width;
    const text = grouped(tick);
    const room = context.measureText(text).width / 2 + 6;
    if (x - room < free || x + room > left + cellsWidth + 24) continue;
    context.beginPath();
    context.moveTo(x, bottom);
    context.lineTo(x, bottom + 4);
    context.stroke();
    context.textAlign = "center";
    context.fillText(text, x, bottom + 6);
    free = x + room;
  }
  if (label) {
    context.textAlign = "right";
    context.fillStyle = ink("--ink-3");
    context.fillText("step", left - 8, bottom + 6);
  }
}

export interface Spot {
  row: number;
  column: number;
}

// Below: the row under the cross-hair over time. The band is what lies between least and greatest.
export function drawSeries(context: Pen, frame: Frame, grid: Grid, cells: Cells, spot: Spot, scale: Scale, title: string, colour: string): void {
  if (!frame.stripHeight) return;
  const top = frame.top + frame.cellsHeight + AXIS + GAP + 14;
  const height = frame.stripHeight - 16;
  const { left, cellsWidth } = frame;
  const width = cellsWidth / (cells.right - cells.left);
  const at = (column: number) => spot.row * grid.columns + column;
  let least = 1;
  let most = 0;
  for (let c = cells.left; c < cells.right; c++) {
    const low = grid.low[at(c)] ?? NaN;
    const high = grid.high[at(c)] ?? NaN;
    if (Number.isFinite(low)) least = Math.min(least, scale.place(low));
    if (Number.isFinite(high)) most = Math.max(most, scale.place(high));
  }
  context.fillStyle = ink("--panel");
  context.fillRect(left, top, cellsWidth, height);
  context.fillStyle = ink("--ink-2");
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(shorten(context, title, cellsWidth), left, top - 3);
  if (most < least) return;
  const pad = Math.max(0.02, (most - least) * 0.1);
  const y = (place: number) => top + height - ((place - least + pad) / (most - least + 2 * pad)) * height;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = ink("--ink-3");
  context.fillText(show(scale.value(most)), left - 8, Math.max(top + 6, y(most)));
  if (y(least) - y(most) > 14) context.fillText(show(scale.value(least)), left - 8, Math.min(top + height - 6, y(least)));
  context.fillStyle = colour;
  context.strokeStyle = colour;
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.beginPath();
  let joined = false;
  for (let c = cells.left; c < cells.right; c++) {
    const low = grid.low[at(c)] ?? NaN;
    const high = grid.high[at(c)] ?? NaN;
    const there = Number.isFinite(low) && Number.isFinite(high);
    if (there) {
      const upper = y(scale.place(high));
      const lower = y(scale.place(low));
      const x = left + (c - cells.left + 0.5) * width;
      if (lower - upper > 1) context.fillRect(x - Math.max(0.5, width / 2), upper, Math.max(1, width), lower - upper);
      if (joined) context.lineTo(x, (upper + lower) / 2);
      else context.moveTo(x, (upper + lower) / 2);
    }
    joined = there;
  }
  context.stroke();
}

// On the right: every row at the step under the cross-hair, the picture of depth.
export function drawProfile(context: Pen, frame: Frame, grid: Grid, cells: Cells, spot: Spot, scaleOf: (row: number) => Scale, title: string, colour: string): void {
  if (!frame.stripWidth) return;
  const left = frame.left + frame.cellsWidth + GAP;
  const { top, cellsHeight, stripWidth: width } = frame;
  const height = cellsHeight / (cells.bottom - cells.top);
  context.fillStyle = ink("--panel");
  context.fillRect(left, top, width, cellsHeight);
  context.fillStyle = ink("--ink-2");
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(title, left, top - 4);
  context.fillStyle = colour;
  for (let r = cells.top; r < cells.bottom; r++) {
    const scale = scaleOf(r);
    const usual = grid.usual(scale);
    const value = grid.value(r, spot.column, usual, scale);
    if (!Number.isFinite(value)) continue;
    const y = top + (r - cells.top) * height;
    context.fillRect(left, y + Math.min(1, height * 0.15), Math.max(1, scale.place(value) * width), Math.max(0.7, height - Math.min(2, height * 0.3)));
  }
  context.fillStyle = ink("--ink-3");
  context.textBaseline = "top";
  context.textAlign = "left";
  const first = scaleOf(cells.top);
  context.fillText(show(first.low), left, top + cellsHeight + 6);
  context.textAlign = "right";
  context.fillText(show(first.high), left + width, top + cellsHeight + 6);
}
