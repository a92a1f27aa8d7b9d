// Lines over steps: a thin frame around uPlot in the page's colours. The part that is looked at is the page's, not
// the chart's, so that it survives new values and travels in the address.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { grouped, logTicks, show } from "./numbers";
import { Take } from "./take/menu";
import { linesCsv, linesSvg } from "./take/lines";
import { ink, useDark } from "./theme";

export interface Line {
  label: string;
  colour: string;
  values: ArrayLike<number>;
  width?: number;
  dash?: number[];
  points?: boolean;
  unnamed?: boolean; // not in the legend
  there?: ArrayLike<number> | undefined; // 1 recorded, 0 a step of another line, 2 missing; without it all were recorded
  raw?: ArrayLike<number>; // as logged, where `values` are smoothed
}

export type Stretch = [number, number, string?]; // steps from and to, and whose

interface Props {
  steps: ArrayLike<number>;
  lines: Line[];
  band?: [number, number]; // the lines between which the area is filled
  log?: boolean;
  height?: number;
  mark?: { x: number; text: string } | null;
  xLabel?: (value: number) => string;
  sync?: string;
  xName?: string;
  yName?: string;
  broken?: Stretch[]; // stretches of steps with NaN or inf
  gaps?: [number, number][]; // neighbouring steps between which records are missing
  range?: [number | null, number | null];
  select?: (from: number | null, to: number | null) => void;
  yRange?: [number, number] | null;
  name: string; // of the files that are saved
}

export const recorded = (line: Line, i: number): boolean => !line.there || line.there[i] === 1;

// uPlot draws gaps for null and joins over undefined.
const plain = (line: Line, log: boolean): (number | null | undefined)[] =>
  Array.from(line.values, (v, i) => (line.there?.[i] === 2 ? null : !recorded(line, i) ? undefined : Number.isFinite(v) && (!log || v > 0) ? v : null));

// A place between two steps with missing records, so that no line is drawn over them.
function openGaps(steps: ArrayLike<number>, data: (number | null | undefined)[][], gaps: [number, number][]): { x: number[]; data: (number | null | undefined)[][]; from: number[] } {
  const after = new Map(gaps.map(([a, b]) => [a, b]));
  const from = Array.from(steps, (_, i) => i).flatMap((i) => (after.get(steps[i] ?? NaN) === steps[i + 1] && i + 1 < steps.length ? [i, -1] : [i]));
  const x = from.map((i, at) => (i >= 0 ? steps[i] ?? 0 : ((steps[from[at - 1] ?? 0] ?? 0) + (steps[from[at + 1] ?? 0] ?? 0)) / 2));
  return { x, data: data.map((row) => from.map((i) => (i >= 0 ? row[i] : null))), from };
}

const ratio = (): number => window.devicePixelRatio || 1;

function drawMark(plot: uPlot, mark: { x: number; text: string }): void {
  const x = plot.valToPos(mark.x, "x", true);
  const { ctx, bbox } = plot;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = ink("--mark");
  ctx.fillStyle = ink("--mark");
  ctx.lineWidth = 1.5 * ratio();
  ctx.setLineDash([5 * ratio(), 4 * ratio()]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${11 * ratio()}px system-ui, sans-serif`;
  const right = x + ctx.measureText(mark.text).width + 8 * ratio() > bbox.left + bbox.width;
  ctx.textAlign = right ? "right" : "left";
  ctx.fillText(mark.text, x + (right ? -6 : 6) * ratio(), bbox.top + 12 * ratio());
  ctx.restore();
}

function band(plot: uPlot, from: number, to: number): [number, number] | null {
  const { bbox } = plot;
  const [start, end] = [plot.valToPos(from, "x", true), plot.valToPos(to, "x", true)];
  if (end < bbox.left || start > bbox.left + bbox.width) return null;
  const left = Math.max(bbox.left, start);
  return [left, Math.max(left + 3 * ratio(), Math.min(bbox.left + bbox.width, end))];
}

function write(plot: uPlot, text: string, [left, right]: [number, number], row: number): void {
  const { ctx, bbox } = plot;
  ctx.font = `${11 * ratio()}px system-ui, sans-serif`;
  const fits = ctx.measureText(text).width + 8 < right - left;
  ctx.textAlign = fits ? "center" : left > bbox.left + bbox.width / 2 ? "right" : "left";
  ctx.fillText(text, fits ? (left + right) / 2 : ctx.textAlign === "right" ? left - 5 : right + 5, bbox.top + bbox.height / 2 + row * 14 * ratio());
}

function drawBroken(plot: uPlot, broken: Stretch[], gaps: [number, number][]): void {
  const { ctx, bbox } = plot;
  const fill = (colour: string, from: number, to: number) => {
    const at = band(plot, from, to);
    ctx.fillStyle = colour;
    if (at) ctx.fillRect(at[0], bbox.top, at[1] - at[0], bbox.height);
  };
  for (const [from, to] of gaps) fill(ink("--absent"), from, to);
  for (const [from, to] of broken) fill(ink("--bad-soft"), from, to);
}

// The words over the bands, above the grid.
function nameBands(plot: uPlot, broken: Stretch[], gaps: [number, number][]): void {
  const owners = [...new Set(broken.map(([, , whose]) => whose))];
  const name = (colour: string, text: string, from: number, to: number, row: number) => {
    const at = band(plot, from, to);
    plot.ctx.fillStyle = colour;
    if (at) write(plot, text, at, row);
  };
  for (const [from, to] of gaps) name(ink("--ink-3"), "not recorded", from, to, 0);
  for (const [from, to, whose] of broken) name(ink("--bad"), whose ? `NaN or inf: ${whose}` : "NaN or inf", from, to, owners.indexOf(whose));
}

// A mark on the lower edge, in the line's colour, at each value that is not finite.
function drawRug(plot: uPlot, x: ArrayLike<number>, lines: Line[]): void {
  const { ctx, bbox } = plot;
  for (const line of lines) {
    ctx.fillStyle = line.colour;
    for (let i = 0; i < x.length; i++) {
      if (!recorded(line, i) || Number.isFinite(line.values[i])) continue;
      const at = plot.valToPos(x[i] ?? 0, "x", true);
      if (at >= bbox.left && at <= bbox.left + bbox.width) ctx.fillRect(at - ratio(), bbox.top + bbox.height - 7 * ratio(), 2 * ratio(), 7 * ratio());
    }
  }
}

function axesOf(log: boolean, xText: (v: number) => string, wide: boolean, xName: string, yName: string): uPlot.Axis[] {
  const axis = { stroke: ink("--ink-2"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--grid"), size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 0 };
  const splits = (u: uPlot, _: number, min: number, max: number) => logTicks(min, max, Math.max(2, u.bbox.height / ratio() / 40));
  return [
    { ...axis, label: xName, size: 30, ...(wide ? { space: 96 } : {}), values: (_, at) => at.map((v) => (v === null ? "" : xText(v))) },
    { ...axis, ...(yName ? { label: yName } : {}), ...(log ? { splits, filter: (_: uPlot, at: number[]) => at } : {}), size: 64, values: (_, at) => at.map((v) => (v === null ? "" : show(v))) },
  ];
}

const EMPTY: never[] = [];

export function Chart(props: Props) {
  const { steps, lines, band, log = false, height = 210, mark = null, xLabel, sync, broken = EMPTY, gaps = EMPTY, xName = "step", yName = "", range, select, yRange, name } = props;
  const box = useRef<HTMLDivElement>(null);
  const plotted = useRef<uPlot | null>(null);
  const dark = useDark();
  const choose = useRef(select);
  choose.current = select;
  const xText = xLabel ?? ((v: number) => (Number.isInteger(v) ? grouped(v) : ""));
  const [from = null, to = null] = range ?? [];
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const first = steps[0] ?? 0;
    const last = steps[steps.length - 1] ?? first;
    const ends: [number, number] = [from ?? first, to ?? last];
    if (!(ends[1] > ends[0])) ends[1] = ends[0] + 1;
    const opened = openGaps(steps, lines.map((line) => plain(line, log)), gaps);
    let resting = true;
    // A number under another step than the one in front says so.
    const told = (u: uPlot, line: Line, at: number | null): string => {
      const i = at === null ? undefined : opened.from[at];
      if (i === undefined || i < 0 || !recorded(line, i)) return i === -1 || (i !== undefined && line.there?.[i] === 2) ? "not recorded" : "–";
      const front = resting ? Math.max(...lasts) : u.cursor.idx;
      const when = front === at || xName === "site" ? "" : ` (${xName} ${xText(steps[i] ?? 0) || show(steps[i])})`;
      const text = line.raw ? `${show(line.raw[i])}, smoothed ${Number.isFinite(line.raw[i]) ? show(line.values[i]) : "–"}` : show(line.values[i]);
      return text + when;
    };
    const lasts = lines.map((line) => {
      let end = opened.x.length - 1;
      while (end > 0 && ((opened.from[end] ?? -1) < 0 || !recorded(line, opened.from[end] ?? 0))) end--;
      return end;
    });
    const options: uPlot.Options = {
      width: element.clientWidth,
      height,
      scales: { x: { time: false, range: ends }, y: { ...(log ? { distr: 3 as const } : {}), ...(yRange ? { range: yRange } : {}) } },
      axes: axesOf(log, xText, xLabel !== undefined, xName, yName),
      legend: { live: true, markers: { width: 3, dash: (_, i) => { const dash = lines[i - 1]?.dash; return !dash ? "solid" : (dash[0] ?? 0) < 4 ? "dotted" : "dashed"; } } },
      focus: { alpha: lines.length > 4 ? 0.25 : 1 },
      cursor: { points: { size: 6 }, focus: { prox: 20 }, ...(sync ? { sync: { key: sync } } : {}), drag: { x: select !== undefined, y: false, setScale: false } },
      series: [
        { label: xName, value: (_, v) => (v === null || v === undefined ? "–" : xText(v) || show(v)) },
        ...lines.map((line): uPlot.Series => ({
          label: line.label, stroke: line.colour, width: line.width ?? 1.5, ...(line.dash ? { dash: line.dash } : {}),
          points: { show: line.points ?? line.values.length < 60, size: 4 },
          value: (u, _v, _s, at) => told(u, line, at), spanGaps: false,
        })),
      ],
      ...(band ? { bands: [{ series: [band[0] + 1, band[1] + 1], fill: ink("--band") }] } : {}),
      hooks: {
        drawClear: [(plot) => drawBroken(plot, broken, gaps)],
        draw: [(plot) => { drawRug(plot, steps, lines); nameBands(plot, broken, gaps); if (mark) drawMark(plot, mark); }],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const a = plot.posToVal(plot.select.left, "x");
          const b = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          choose.current?.(Math.floor(a), Math.ceil(b));
        }],
      },
    };
    const plot = new uPlot(options, [opened.x, ...opened.data] as uPlot.AlignedData, element);
    plotted.current = plot;
    const rows = plot.root.querySelectorAll<HTMLElement>(".u-legend .u-series");
    lines.forEach((line, i) => { if (line.unnamed) rows[i + 1]?.style.setProperty("display", "none"); });
    element.dataset["range"] = `${ends[0]}-${ends[1]}`;
    plot.over.addEventListener("dblclick", () => choose.current?.(null, null));
    element.dataset["broken"] = JSON.stringify(broken);
    element.dataset["gaps"] = JSON.stringify(gaps);
    // With nobody pointing the legend tells each line's last record, also if it is NaN.
    const rest = () => { resting = true; plot.setLegend({ idxs: [Math.max(0, ...lasts), ...lasts] }); };
    plot.over.addEventListener("mouseenter", () => { resting = false; });
    plot.over.addEventListener("mouseleave", rest);
    const later = requestAnimationFrame(rest); // not before uPlot has drawn for the first time
    const watcher = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    return () => {
      cancelAnimationFrame(later);
      watcher.disconnect();
      plot.destroy();
    };
  }, [steps, lines, band, log, dark, mark?.x, broken, gaps, from, to, yRange?.[0], yRange?.[1]]);
  const picture = (): string => {
    const scales = plotted.current?.scales;
    const ends = (key: string): [number, number] => [scales?.[key]?.min ?? 0, scales?.[key]?.max ?? 1];
    return linesSvg({ steps, lines, log, x: ends("x"), y: ends("y"), xName, yName, xText: (v) => xText(v) || show(v) });
  };
  return (
    <div class="charted">
      <Take name={name} png={() => (plotted.current ? [plotted.current.ctx.canvas] : [])} svg={picture} csv={() => linesCsv(xName, steps, lines)} />
      <div class="chart" ref={box} role="img" aria-label={`${name}: ${lines.map((l) => l.label).slice(0, 12).join(", ")} over ${xName}`} />
    </div>
  );
}
