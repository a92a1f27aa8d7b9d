// Histograms over time, as a heat map (values up, steps across) or as ridges.

import { useEffect, useRef, useState } from "preact/hooks";
import { askPacked } from "../api";
import { css, sequential } from "../colour";
import { useAnswer } from "../data";
import { context2d } from "../heat/draw";
import { grouped, show } from "../numbers";
import { ink, useDark } from "../theme";
import type { RunLine } from "../types";

interface HistogramFacts {
  total: number;
}

const LEFT = 64;
const BOTTOM = 24;
const HEIGHT = 220;

export function Histograms({ run, site }: { run: RunLine; site: string }) {
  const [ridges, setRidges] = useState(false);
  const [tip, setTip] = useState<string | null>(null);
  const [width, setWidth] = useState(0);
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = useDark();
  const answer = useAnswer(JSON.stringify([run.id, run.revision, site]), (signal) => askPacked<HistogramFacts>("histograms", { run: run.id, site }, signal));
  const density = answer.value?.arrays["density"];
  const edges = answer.value?.arrays["edges"];
  const steps = answer.value?.arrays["steps"];
  const bins = (edges?.length ?? 1) - 1;

  useEffect(() => {
    const box = canvas.current?.parentElement;
    if (!box) return;
    const watcher = new ResizeObserver(() => setWidth(box.clientWidth));
    watcher.observe(box);
    return () => watcher.disconnect();
  }, [density !== undefined]);

  useEffect(() => {
    const context = canvas.current && width ? context2d(canvas.current, width, HEIGHT) : null;
    if (!context || !density || !edges || !steps) return;
    (ridges ? drawRidges : drawHeat)(context, density, edges, steps, width);
  }, [answer.value, ridges, dark, width]);

  if (!density || !edges || !steps) return null;
  const point = (event: PointerEvent) => {
    if (ridges) return setTip(null);
    const column = Math.floor(((event.offsetX - LEFT) / (width - LEFT - 8)) * steps.length);
    const bin = bins - 1 - Math.floor((event.offsetY / (HEIGHT - BOTTOM)) * bins);
    if (column < 0 || column >= steps.length || bin < 0 || bin >= bins) return setTip(null);
    setTip(`step ${grouped(steps[column] ?? 0)}: ${show(density[column * bins + bin] ?? 0)} values from ${show(edges[bin] ?? 0)} to ${show(edges[bin + 1] ?? 0)}`);
  };
  return (
    <div class="panel">
      <h2>Histograms over time
        <span class="switch" role="group" aria-label="Picture">
          <button aria-pressed={!ridges} onClick={() => setRidges(false)}>heat</button>
          <button aria-pressed={ridges} onClick={() => setRidges(true)}>ridges</button>
        </span>
        <span class="quiet">{tip ?? "brighter: more values"}</span>
      </h2>
      <div><canvas ref={canvas} data-testid="histograms" role="img" aria-label="Histograms over time" style={{ width: `${width}px`, height: `${HEIGHT}px` }} onPointerMove={point} onPointerLeave={() => setTip(null)} /></div>
    </div>
  );
}

type Numbers = ArrayLike<number>;

function drawHeat(context: CanvasRenderingContext2D, density: Numbers, edges: Numbers, steps: Numbers, width: number): void {
  const bins = edges.length - 1;
  const across = (width - LEFT - 8) / steps.length;
  const down = (HEIGHT - BOTTOM) / bins;
  for (let s = 0; s < steps.length; s++) {
    let most = 0;
    for (let b = 0; b < bins; b++) most = Math.max(most, density[s * bins + b] ?? 0);
    for (let b = 0; b < bins; b++) {
      const share = most > 0 ? (density[s * bins + b] ?? 0) / most : 0;
      context.fillStyle = share > 0 ? css(sequential, Math.sqrt(share)) : ink("--absent");
      context.fillRect(LEFT + s * across, (bins - 1 - b) * down, across + 0.4, down + 0.4);
    }
  }
  axes(context, edges, steps, width);
}

// Bins are drawn equally wide, whatever they hold: labels stand at edges, with zero among them.
function edgeTicks(edges: Numbers, about: number): [number, number][] {
  const last = edges.length - 1;
  let middle = 0;
  for (let i = 0; i <= last; i++) if (Math.abs(edges[i] ?? 0) < Math.abs(edges[middle] ?? 0)) middle = i;
  const stride = Math.max(1, Math.ceil(last / about));
  const first = middle - Math.floor(middle / stride) * stride;
  const found: [number, number][] = [];
  for (let i = first; i <= last; i += stride) found.push([i / last, edges[i] ?? 0]);
  return found;
}

function axes(context: CanvasRenderingContext2D, edges: Numbers, steps: Numbers, width: number): void {
  context.fillStyle = ink("--ink-2");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [place, value] of edgeTicks(edges, 7)) {
    const y = (1 - place) * (HEIGHT - BOTTOM);
    context.fillText(show(value), LEFT - 8, Math.max(7, Math.min(HEIGHT - BOTTOM - 6, y)));
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  const stride = Math.max(1, Math.ceil(steps.length / Math.max(2, Math.floor((width - LEFT) / 90))));
  for (let s = 0; s < steps.length; s += stride) {
    const x = LEFT + ((s + 0.5) / steps.length) * (width - LEFT - 8);
    context.fillText(grouped(steps[s] ?? 0), Math.min(x, width - 24), HEIGHT - BOTTOM + 7);
  }
}

function drawRidges(context: CanvasRenderingContext2D, density: Numbers, edges: Numbers, steps: Numbers, width: number): void {
  const bins = edges.length - 1;
  const most = Math.min(24, steps.length);
  const top = 40;
  const right = width - 8;
  for (let i = 0; i < most; i++) {
    const s = most === 1 ? 0 : Math.round((i * (steps.length - 1)) / (most - 1));
    let peak = 0;
    for (let b = 0; b < bins; b++) peak = Math.max(peak, density[s * bins + b] ?? 0);
    const base = top + (i / Math.max(1, most - 1)) * (HEIGHT - BOTTOM - top - 2);
    context.beginPath();
    context.moveTo(LEFT, base);
    for (let b = 0; b < bins; b++) {
      const x = LEFT + ((b + 0.5) / bins) * (right - LEFT);
      context.lineTo(x, base - (peak > 0 ? (density[s * bins + b] ?? 0) / peak : 0) * 38);
    }
    context.lineTo(right, base);
    context.closePath();
    context.fillStyle = css(sequential, 0.15 + (0.75 * i) / Math.max(1, most - 1));
    context.fill();
    context.strokeStyle = ink("--panel");
    context.lineWidth = 1;
    context.stroke();
    if (i === 0 || i === most - 1 || (i % 6 === 0 && most - 1 - i > 3)) {
      context.fillStyle = ink("--ink-2");
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(grouped(steps[s] ?? 0), LEFT - 8, base - 4);
    }
  }
  context.fillStyle = ink("--ink-2");
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const [place, value] of edgeTicks(edges, 8)) {
    const x = LEFT + place * (right - LEFT);
    if (x > LEFT + 10 && x < right - 14) context.fillText(show(value), x, HEIGHT - BOTTOM + 7);
  }
}
