// What lies over the cells: the cross-hair, a selection that is being drawn, rings around findings.

import type { Pen } from "../take/svg";
import type { Frame, Spot } from "./draw";
import type { Cells, Grid } from "./grid";

export interface Flag {
  row: number; // in the whole map
  step: number;
  text: string;
  grave: boolean;
}

export interface Drag { x: number; y: number; toX: number; toY: number }

export function drawCross(context: Pen, frame: Frame, cells: Cells, spot: Spot): void {
  const width = frame.cellsWidth / (cells.right - cells.left);
  const height = frame.cellsHeight / (cells.bottom - cells.top);
  const x = frame.left + (spot.column - cells.left + 0.5) * width;
  const y = frame.top + (spot.row - cells.top + 0.5) * height;
  for (const [colour, line] of [["rgba(0,0,0,.55)", 3], ["rgba(255,255,255,.9)", 1]] as const) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.beginPath();
    context.moveTo(x, frame.lossHeight ? frame.top - frame.lossHeight - 22 : frame.top);
    context.lineTo(x, frame.top + frame.cellsHeight);
    context.moveTo(frame.left, y);
    context.lineTo(frame.left + frame.cellsWidth, y);
    context.stroke();
  }
}

export function drawSelection(context: Pen, frame: Frame, drag: Drag): void {
  const flat = Math.abs(drag.toY - drag.y) < 8;
  const thin = Math.abs(drag.toX - drag.x) < 8;
  const x = thin ? frame.left : Math.min(drag.x, drag.toX);
  const y = flat ? frame.top : Math.min(drag.y, drag.toY);
  const width = thin ? frame.cellsWidth : Math.abs(drag.toX - drag.x);
  const height = flat ? frame.cellsHeight : Math.abs(drag.toY - drag.y);
  context.fillStyle = "rgba(255,255,255,.22)";
  context.strokeStyle = "#fff";
  context.lineWidth = 1;
  context.fillRect(x, y, width, height);
  context.strokeRect(x, y, width, height);
}

// A ring around the place where a finding begins, with a few words.
export function drawFlags(context: Pen, frame: Frame, grid: Grid, cells: Cells, flags: Flag[]): void {
  const width = frame.cellsWidth / (cells.right - cells.left);
  const height = frame.cellsHeight / (cells.bottom - cells.top);
  const taken: [number, number][] = [];
  for (const flag of flags) {
    const inside = flag.row - grid.facts.firstRow;
    if (inside < 0 || inside >= grid.facts.shownRows) continue;
    if (flag.step < (grid.steps[0] ?? 0) || flag.step > (grid.facts.lastStep ?? 0)) continue;
    const row = grid.rowAt(flag.row);
    const column = grid.columnAt(flag.step);
    if (row < cells.top || row >= cells.bottom || column < cells.left || column >= cells.right) continue;
    const x = frame.left + (column - cells.left + 0.5) * width;
    const y = frame.top + (row - cells.top + 0.5) * height;
    if (taken.some(([a, b]) => Math.abs(a - x) < 150 && Math.abs(b - y) < 20)) continue;
    taken.push([x, y]);
    for (const [colour, line] of [["#000", 4.5], ["#fff", 2]] as const) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.beginPath();
      context.arc(x, y, 7, 0, 2 * Math.PI);
      context.stroke();
    }
    const room = context.measureText(flag.text).width + 12;
    const toLeft = x + 14 + room > frame.left + frame.cellsWidth;
    const at = toLeft ? x - 14 - room : x + 14;
    context.fillStyle = "rgba(20,22,30,.88)";
    context.beginPath();
    context.roundRect(at, y - 9, room, 18, 4);
    context.fill();
    context.fillStyle = "#fff";
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(flag.text, at + 6, y + 0.5);
  }
}
