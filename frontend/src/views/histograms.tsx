// Histograms over time as densities: heat (values up, steps across), or ridges one behind the other.

import { useEffect, useRef, useState } from "preact/hooks";
import { askPacked, live } from "../api";
import { useAnswer } from "../data";
import { context2d } from "../heat/draw";
import { grouped, show } from "../numbers";
import { drawHeat, drawRidges, HEIGHT, LEFT, BOTTOM, type Bins } from "../ridges";
import { adjust } from "../route";
import { Take } from "../take/menu";
import { csv } from "../take/save";
import { SvgPen } from "../take/svg";
import { ink, useDark } from "../theme";
import type { RunLine } from "../types";

interface HistogramFacts {
  total: number;
  linear: boolean;
}

export function Histograms({ run, site, params }: { run: RunLine; site: string; params: Record<string, string> }) {
  const ridges = params["histograms"] === "ridges";
  const phase = params["phase"];
  const recorded = params["bins"] === "recorded";
  const [tip, setTip] = useState<string | null>(null);
  const [width, setWidth] = useState(0);
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = useDark();
  const answer = useAnswer(
    JSON.stringify([run.name, run.revision, phase, site, recorded]),
    (signal) => askPacked<HistogramFacts>("histograms", { run: run.name, phase, site, axis: recorded ? "recorded" : null }, signal), `${run.name} ${site} ${phase}`,
  );
  const arrays = answer.value?.arrays;
  const bins: Bins | null = arrays?.["density"] && arrays["edges"] && arrays["steps"] ? { density: arrays["density"], edges: arrays["edges"], steps: arrays["steps"] } : null;
  const beyond = Array.from(arrays?.["beyond"] ?? []).reduce((a, b) => a + b, 0);

  useEffect(() => {
    const box = canvas.current?.parentElement;
    if (!box) return;
    const watcher = new ResizeObserver(() => setWidth(box.clientWidth));
    watcher.observe(box);
    return () => watcher.disconnect();
  }, [bins !== null]);

  useEffect(() => {
    const context = canvas.current && width ? context2d(canvas.current, width, HEIGHT) : null;
    if (context && bins) (ridges ? drawRidges : drawHeat)(context, bins, width);
  }, [answer.value, ridges, dark, width]);

  if (!bins) return null;
  const { density, edges, steps } = bins;
  const count = edges.length - 1;
  const point = (event: PointerEvent) => {
    if (ridges) return setTip(null);
    const column = Math.floor(((event.offsetX - LEFT) / (width - LEFT - 8)) * steps.length);
    const bin = count - 1 - Math.floor((event.offsetY / (HEIGHT - BOTTOM)) * count);
    if (column < 0 || column >= steps.length || bin < 0 || bin >= count) return setTip(null);
    const [low, high] = [edges[bin] ?? 0, edges[bin + 1] ?? 0];
    const there = density[column * count + bin] ?? 0;
    setTip(`step ${grouped(steps[column] ?? 0)}: ${recorded ? `${show(there)} values` : `${show(Number((100 * there * (high - low)).toPrecision(3)))} % of the values`} from ${show(low)} to ${show(high)}`);
  };
  const svg = () => {
    const pen = new SvgPen(width, HEIGHT, ink("--paper"));
    (ridges ? drawRidges : drawHeat)(pen, bins, width);
    return pen.text();
  };
  const table = () => csv(["step", ...Array.from({ length: count }, (_, b) => `${edges[b]} to ${edges[b + 1]}`)], Array.from(steps, (s, i) => [s, ...Array.from({ length: count }, (_, b) => density[i * count + b])]));
  return (
    <div class="panel">
      <h2>Histograms over time
        <span class="switch" role="group" aria-label="Picture">
          <button aria-pressed={!ridges} onClick={() => adjust({ histograms: null })}>heat</button>
          <button aria-pressed={ridges} onClick={() => adjust({ histograms: "ridges" })}>ridges</button>
        </span>
        {live && (
          <span class="switch" role="group" aria-label="Bins">
            <button aria-pressed={!recorded} onClick={() => adjust({ bins: null })}>density</button>
            <button aria-pressed={recorded} onClick={() => adjust({ bins: "recorded" })}>bins as recorded</button>
          </span>
        )}
        <span class="quiet">{tip ?? (ridges ? "later steps in front; the taller, the more values" : "brighter: more values")}{beyond >= 1 && `; ${grouped(Math.round(beyond))} values lie beyond the axis`}</span>
      </h2>
      <div class="pictured">
        <Take name={`${run.name}-${site}-histograms`} png={() => (canvas.current ? [canvas.current] : [])} svg={svg} csv={table} />
        <canvas ref={canvas} data-testid="histograms" role="img" aria-label="Histograms over time" style={{ width: `${width}px`, height: `${HEIGHT}px` }} onPointerMove={point} onPointerLeave={() => setTip(null)} />
      </div>
    </div>
  );
}
