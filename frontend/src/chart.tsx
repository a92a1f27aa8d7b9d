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
  sparse?: boolean; // a step without a value is no gap: it belongs to another line
}

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
  broken?: [number, number][]; // stretches of steps with NaN or inf
  range?: [number | null, number | null];
  select?: (from: number | null, to: number | null) => void;
  yRange?: [number, number] | null;
  name: string; // of the files that are saved
}

// uPlot draws gaps for null and joins over undefined.
const plain = (line: Line, log: boolean): (number | null | undefined)[] =>
  Array.from(line.values, (v) => (Number.isFinite(v) && (!log || v > 0) ? v : line.sparse && Number.isNaN(v) ? undefined : null));

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

function drawBroken(plot: uPlot, broken: [number, number][]): void {
  const { ctx, bbox } = plot;
  const end = bbox.left + bbox.width;
  for (const [from, to] of broken) {
    const left = Math.max(bbox.left, plot.valToPos(from, "x", true));
    const right = Math.max(left + 3 * ratio(), Math.min(end, plot.valToPos(to, "x", true)));
    if (plot.valToPos(to, "x", true) < bbox.left || left > end) continue;
    ctx.fillStyle = ink("--bad-soft");
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.fillStyle = ink("--bad");
    ctx.fillRect(left, bbox.top, ratio(), bbox.height);
    ctx.font = `${11 * ratio()}px system-ui, sans-serif`;
    const fits = ctx.measureText("NaN or inf").width + 8 < right - left;
    ctx.textAlign = fits ? "center" : left > bbox.left + bbox.width / 2 ? "right" : "left";
    ctx.fillText("NaN or inf", fits ? (left + right) / 2 : ctx.textAlign === "right" ? left - 5 : right + 5, bbox.top + bbox.height / 2);
  }
}

function axesOf(log: boolean, xText: (v: number) => string, wide: boolean): uPlot.Axis[] {
  const axis = { stroke: ink("--ink-2"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--grid"), size: 4 }, font: "11px system-ui, sans-serif" };
  const splits = (u: uPlot, _: number, min: number, max: number) => logTicks(min, max, Math.max(2, u.bbox.height / ratio() / 40));
  return [
    { ...axis, size: 30, ...(wide ? { space: 96 } : {}), values: (_, at) => at.map((v) => (v === null ? "" : xText(v))) },
    { ...axis, ...(log ? { splits, filter: (_: uPlot, at: number[]) => at } : {}), size: 64, values: (_, at) => at.map((v) => (v === null ? "" : show(v))) },
  ];
}

export function Chart(props: Props) {
  const { steps, lines, band, log = false, height = 210, mark = null, xLabel, sync, broken, xName = "step", range, select, yRange, name } = props;
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
    const options: uPlot.Options = {
      width: element.clientWidth,
      height,
      scales: { x: { time: false, range: ends }, y: { ...(log ? { distr: 3 as const } : {}), ...(yRange ? { range: yRange } : {}) } },
      axes: axesOf(log, xText, xLabel !== undefined),
      legend: { live: true },
      cursor: { points: { size: 6 }, ...(sync ? { sync: { key: sync } } : {}), drag: { x: select !== undefined, y: false, setScale: false } },
      series: [
        { label: xName, value: (_, v) => (v === null || v === undefined ? "–" : xText(v) || show(v)) },
        ...lines.map((line): uPlot.Series => ({
          label: line.label, stroke: line.colour, width: line.width ?? 1.5, ...(line.dash ? { dash: line.dash } : {}),
          points: { show: line.points ?? line.values.length < 60, size: 4 },
          value: (_, v) => (v === null || v === undefined ? "–" : show(v)), spanGaps: false,
        })),
      ],
      ...(band ? { bands: [{ series: [band[0] + 1, band[1] + 1], fill: ink("--band") }] } : {}),
      hooks: {
        drawClear: [(plot) => drawBroken(plot, broken ?? [])],
        draw: [(plot) => mark && drawMark(plot, mark)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const a = plot.posToVal(plot.select.left, "x");
          const b = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          choose.current?.(Math.floor(a), Math.ceil(b));
        }],
      },
    };
    const data = [Array.from(steps), ...lines.map((line) => plain(line, log))] as uPlot.AlignedData;
    const plot = new uPlot(options, data, element);
    plotted.current = plot;
    const rows = plot.root.querySelectorAll<HTMLElement>(".u-legend .u-series");
    lines.forEach((line, i) => { if (line.unnamed) rows[i + 1]?.style.setProperty("display", "none"); });
    element.dataset["range"] = `${ends[0]}-${ends[1]}`;
    plot.over.addEventListener("dblclick", () => choose.current?.(null, null));
    // With nobody pointing the legend tells the last values.
    const lasts = lines.map((line) => {
      let end = steps.length - 1;
      while (end > 0 && !Number.isFinite(line.values[end])) end--;
      return end;
    });
    const rest = () => plot.setLegend({ idxs: [Math.max(0, ...lasts), ...lasts] });
    plot.over.addEventListener("mouseleave", rest);
    const later = requestAnimationFrame(rest); // not before uPlot has drawn for the first time
    const watcher = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    return () => {
      cancelAnimationFrame(later);
      watcher.disconnect();
      plot.destroy();
    };
  }, [steps, lines, band, log, dark, mark?.x, broken, from, to, yRange?.[0], yRange?.[1]]);
  const picture = (): string => {
    const scales = plotted.current?.scales;
    const ends = (key: string): [number, number] => [scales?.[key]?.min ?? 0, scales?.[key]?.max ?? 1];
    return linesSvg({ steps, lines, log, x: ends("x"), y: ends("y"), xName, xText: (v) => xText(v) || show(v) });
  };
  return (
    <div class="charted">
      <Take name={name} png={() => (plotted.current ? [plotted.current.ctx.canvas] : [])} svg={picture} csv={() => linesCsv(xName, steps, lines)} />
      <div class="chart" ref={box} role="img" aria-label={`${name}: ${lines.map((l) => l.label).slice(0, 12).join(", ")} over ${xName}`} />
    </div>
  );
}
