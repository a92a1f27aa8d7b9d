// Lines over steps as SVG: the picture of a chart that scales.

import { recorded, type Line } from "../chart";
import { logTicks, show, ticks } from "../numbers";
import { ink } from "../theme";
import { csv } from "./save";
import { SvgPen } from "./svg";

export interface LinesPicture {
  steps: ArrayLike<number>;
  lines: Line[];
  log: boolean;
  x: [number, number];
  y: [number, number];
  xName: string;
  yName: string;
  xText: (value: number) => string;
}

const LEFT = 70;
const BOTTOM = 34;

export function linesSvg({ steps, lines, log, x, y, xName, yName, xText }: LinesPicture, width = 960, height = 420): string {
  const pen = new SvgPen(width, height, ink("--paper"));
  const legend = 18 * Math.ceil(lines.length / 4);
  const bottom = height - BOTTOM - legend;
  const bend = (v: number) => (log ? Math.log10(v) : v);
  const px = (v: number) => LEFT + ((v - x[0]) / (x[1] - x[0] || 1)) * (width - LEFT - 14);
  const py = (v: number) => bottom - ((bend(v) - bend(y[0])) / (bend(y[1]) - bend(y[0]) || 1)) * (bottom - 12);
  pen.strokeStyle = ink("--grid");
  pen.fillStyle = ink("--ink-2");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const tick of (log ? logTicks : ticks)(y[0], y[1], 6)) {
    pen.beginPath();
    pen.moveTo(LEFT, py(tick));
    pen.lineTo(width - 14, py(tick));
    pen.stroke();
    pen.fillText(show(tick), LEFT - 6, py(tick));
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const tick of ticks(x[0], x[1], 8)) pen.fillText(xText(tick), px(tick), bottom + 6);
  pen.fillText(xName, (LEFT + width) / 2, bottom + 19);
  pen.textAlign = "left";
  pen.fillText(yName, LEFT + 4, 0);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 8, width - LEFT - 14, bottom - 8);
  pen.clip();
  for (const line of lines) {
    pen.strokeStyle = line.colour;
    pen.lineWidth = line.width ?? 1.5;
    pen.setLineDash(line.dash ?? []);
    pen.beginPath();
    let joined = false;
    for (let i = 0; i < steps.length; i++) {
      const v = line.values[i] ?? NaN;
      if (!recorded(line, i)) continue;
      const there = Number.isFinite(v) && (!log || v > 0);
      if (there) joined ? pen.lineTo(px(steps[i] ?? 0), py(v)) : pen.moveTo(px(steps[i] ?? 0), py(v));
      joined = there;
    }
    pen.stroke();
  }
  pen.restore();
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  lines.forEach((line, i) => {
    const at = LEFT + (i % 4) * ((width - LEFT - 14) / 4);
    const row = height - legend + 9 + 18 * Math.floor(i / 4);
    pen.fillStyle = line.colour;
    pen.fillRect(at, row - 5, 10, 10);
    pen.fillStyle = ink("--ink-2");
    pen.fillText(line.label, at + 15, row);
  });
  return pen.text();
}

export const linesCsv = (xName: string, steps: ArrayLike<number>, lines: Line[]): string =>
  csv([xName, ...lines.map((l) => l.label)], Array.from(steps, (s, i) => [s, ...lines.map((l) => (recorded(l, i) ? l.values[i] : null))]));
