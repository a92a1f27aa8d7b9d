// Drawing of distributions over time.

import { css, sequential } from "./colour";
import { grouped, show } from "./numbers";
import type { Pen } from "./take/svg";
import { ink } from "./theme";

export const LEFT = 64;
export const BOTTOM = 24;
export const HEIGHT = 260;

type Numbers = ArrayLike<number>;
export interface Bins { density: Numbers; edges: Numbers; steps: Numbers }

export function drawHeat(pen: Pen, { density, edges, steps }: Bins, width: number): void {
  const bins = edges.length - 1;
  const across = (width - LEFT - 8) / steps.length;
  const down = (HEIGHT - BOTTOM) / bins;
  for (let s = 0; s < steps.length; s++) {
    let most = 0;
    for (let b = 0; b < bins; b++) most = Math.max(most, density[s * bins + b] ?? 0);
    for (let b = 0; b < bins; b++) {
      const share = most > 0 ? (density[s * bins + b] ?? 0) / most : 0;
      pen.fillStyle = share > 0 ? css(sequential, Math.sqrt(share)) : ink("--absent");
      pen.fillRect(LEFT + s * across, (bins - 1 - b) * down, across + 0.4, down + 0.4);
    }
  }
  pen.fillStyle = ink("--ink-2");
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [place, value] of edgeTicks(edges, 7)) {
    const y = (1 - place) * (HEIGHT - BOTTOM);
    pen.fillText(show(value), LEFT - 8, Math.max(7, Math.min(HEIGHT - BOTTOM - 6, y)));
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  const stride = Math.max(1, Math.ceil(steps.length / Math.max(2, Math.floor((width - LEFT) / 90))));
  for (let s = 0; s < steps.length; s += stride) {
    const x = LEFT + ((s + 0.5) / steps.length) * (width - LEFT - 8);
    pen.fillText(grouped(steps[s] ?? 0), Math.min(x, width - 24), HEIGHT - BOTTOM + 7);
  }
}

// Bins are drawn equally wide: labels stand at edges, with zero among them.
function edgeTicks(edges: Numbers, about: number): [number, number][] {
  const last = edges.length - 1;
  let middle = 0;
  for (let i = 0; i <= last; i++) if (Math.abs(edges[i] ?? 0) < Math.abs(edges[middle] ?? 0)) middle = i;
  const stride = Math.max(1, Math.ceil(last / about));
  const first = middle - Math.floor(middle / stride) * stride;
  const found: [number, number][] = [];
  for (let i = first; i <= last; i += stride) found.push([i / last, Number((edges[i] ?? 0).toPrecision(3))]);
  return found;
}

const MOST = 28;

// One behind the other, the oldest at the back, all with the same measure of height: a narrow peak is tall.
export function drawRidges(pen: Pen, { density, edges, steps }: Bins, width: number): void {
  const bins = edges.length - 1;
  const most = Math.min(MOST, steps.length);
  const chosen = Array.from({ length: most }, (_, i) => (most === 1 ? 0 : Math.round((i * (steps.length - 1)) / (most - 1))));
  const peaks = chosen.map((s) => Math.max(...Array.from({ length: bins }, (_, b) => density[s * bins + b] ?? 0))).filter((p) => p > 0).sort((a, b) => a - b);
  const measure = peaks[Math.floor(0.8 * (peaks.length - 1))] ?? 1;
  const tall = 84;
  const bottom = HEIGHT - BOTTOM - 2;
  const right = width - 58;
  chosen.forEach((s, i) => {
    const base = tall + 8 + (i / Math.max(1, most - 1)) * (bottom - tall - 8);
    const y = (b: number) => base - Math.min(1.15, (density[s * bins + b] ?? 0) / measure) * tall;
    pen.beginPath();
    pen.moveTo(16, base);
    for (let b = 0; b < bins; b++) pen.lineTo(16 + ((b + 0.5) / bins) * (right - 16), y(b));
    pen.lineTo(right, base);
    pen.closePath();
    pen.fillStyle = css(sequential, 0.12 + (0.72 * i) / Math.max(1, most - 1));
    pen.fill();
    pen.strokeStyle = ink("--paper");
    pen.lineWidth = 1;
    pen.stroke();
    if (i === 0 || i === most - 1 || (i % 7 === 0 && most - 1 - i > 3)) {
      pen.fillStyle = ink("--ink-2");
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(grouped(steps[s] ?? 0), right + 8, base - 3);
    }
  });
  pen.fillStyle = ink("--ink-2");
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (const [place, value] of edgeTicks(edges, 8)) {
    const x = 16 + place * (right - 16);
    if (x > 26 && x < right - 14) pen.fillText(show(value), x, HEIGHT - BOTTOM + 7);
  }
}
