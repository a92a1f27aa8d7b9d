// Parallel coordinates: what a sweep went over on the left, results on the right; drag along an axis to choose.

import { useState } from "preact/hooks";
import { css, sequential } from "../colour";
import { plural } from "../numbers";
import { go } from "../route";
import type { RunLine } from "../types";
import { columnAxis } from "./axis";
import { varied } from "./columns";
import { fact } from "./filter";
import { ColumnPicker, keysOf, usualResult } from "./scatter";

const HEIGHT = 420;
const TOP = 58; // names, and the lane of NaN
const BOTTOM = 34; // the lane of what was not logged
const MOST_AXES = 10;

export function Parallel({ runs, params }: { runs: RunLine[]; params: Record<string, string> }) {
  const [brush, setBrush] = useState<Record<string, [number, number]>>({});
  const [drag, setDrag] = useState<[string, number] | null>(null);
  const keys = keysOf(runs);
  const result = keys.includes(params["sy"] ?? "") ? params["sy"] ?? "" : usualResult(runs, keys);
  const labels = varied(runs).slice(0, MOST_AXES - 1);
  const axes = [...new Set([...(labels.length > 0 ? labels : ["steps"]), result])].map((key) => ({ key, axis: columnAxis(runs, key) }));
  const width = Math.max(700, axes.length * 130);
  const px = (i: number) => 70 + (i * (width - 150)) / Math.max(1, axes.length - 1);
  const py = (at: number) => HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM);
  const height = (axis: (typeof axes)[number]["axis"], run: RunLine) => (!axis.has(run) ? HEIGHT - 10 : Number.isNaN(axis.place(run)) ? TOP - 16 : py(axis.place(run)));
  const chosen = (run: RunLine) => Object.entries(brush).every(([key, [low, high]]) => {
    const at = axes.find((a) => a.key === key)?.axis.place(run) ?? NaN;
    return at >= low && at <= high;
  });
  const last = axes[axes.length - 1]?.axis;
  const colour = (run: RunLine) => (!last || !last.has(run) || Number.isNaN(last.place(run)) ? "var(--bad)" : css(sequential, 0.05 + 0.8 * last.place(run)));
  const at = (event: PointerEvent) => {
    const box = (event.currentTarget as SVGElement).ownerSVGElement?.getBoundingClientRect();
    const y = box ? ((event.clientY - box.top) / box.height) * HEIGHT : 0;
    return Math.min(1, Math.max(0, (HEIGHT - BOTTOM - y) / (HEIGHT - TOP - BOTTOM)));
  };
  const kept = runs.filter(chosen);
  return (
    <div class="sweep">
      <div class="tools">
        <ColumnPicker label="Result" name="sy" keys={keys} value={result} />
        {Object.keys(brush).length > 0 && <button class="chip" onClick={() => setBrush({})}>{plural(kept.length, "run")} chosen ×</button>}
      </div>
      <figure class="panel">
        <svg class="parallel" viewBox={`0 0 ${width} ${HEIGHT}`} role="img" aria-label={`Parallel coordinates of ${plural(runs.length, "run")}: ${axes.map((a) => a.key).join(", ")}`}>
          {[...runs].sort((a, b) => Number(chosen(a)) - Number(chosen(b))).map((run) => (
            <polyline key={run.name} class={chosen(run) ? "thread" : "thread faint"} data-run={run.name} data-value={String(fact(run, result))} points={axes.map(({ axis }, i) => `${px(i)},${height(axis, run).toFixed(1)}`).join(" ")} style={{ stroke: colour(run) }} onClick={() => go("map", { run: run.name })}>
              <title>{run.name}: {axes.map(({ key }) => `${key} ${String(fact(run, key) ?? "not logged")}`).join(", ")}</title>
            </polyline>
          ))}
          {axes.map(({ key, axis }, i) => (
            <g key={key} transform={`translate(${px(i)} 0)`}>
              <text class="axisname" y={16} text-anchor="middle">{(key === "loss" ? "last loss" : key.replace(":", " ")) + (axis.log ? " (log)" : "")}</text>
              {runs.some((r) => axis.has(r) && Number.isNaN(axis.place(r))) && <text class="bad" y={TOP - 22} text-anchor="middle">NaN or inf</text>}
              {runs.some((r) => !axis.has(r)) && <text y={HEIGHT - 1} text-anchor="middle">not logged</text>}
              <line class="axisline" y1={TOP} y2={HEIGHT - BOTTOM} />
              {axis.ticks.map((t) => <text key={t.text} x={i === axes.length - 1 ? 8 : -8} y={py(t.at) + 4} text-anchor={i === axes.length - 1 ? "start" : "end"}>{t.text}</text>)}
              {brush[key] && <rect class="brush" x={-7} width={14} y={py(brush[key][1])} height={Math.max(2, py(brush[key][0]) - py(brush[key][1]))} />}
              <rect
                class="grip" x={-12} width={24} y={TOP} height={HEIGHT - TOP - BOTTOM}
                onPointerDown={(e) => { e.currentTarget.setPointerCapture(e.pointerId); setDrag([key, at(e)]); }}
                onPointerMove={(e) => { if (drag && drag[0] === key) { const y = at(e); setBrush({ ...brush, [key]: [Math.min(drag[1], y), Math.max(drag[1], y)] }); } }}
                onPointerUp={() => setDrag(null)}
              />
            </g>
          ))}
        </svg>
        <figcaption class="note">Each line is a run, coloured by {result === "loss" ? "last loss" : result.replace(":", " ")}. Drag along an axis to choose runs.</figcaption>
      </figure>
    </div>
  );
}
