// Lines over steps: a thin frame around uPlot in the page's colours.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { show } from "./numbers";
import { ink, useDark } from "./theme";

export interface Line {
  label: string;
  colour: string;
  values: ArrayLike<number>;
  width?: number;
  dash?: number[];
  points?: boolean;
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
}

// uPlot draws gaps for null and breaks on NaN.
const plain = (values: ArrayLike<number>, log: boolean): (number | null)[] =>
  Array.from(values, (v) => (Number.isFinite(v) && (!log || v > 0) ? v : null));

// On a logarithmic axis only powers of ten get a line, unless there are hardly any.
function powersOnly(axis: { grid: object; ticks: object }) {
  const filter = (_: uPlot, at: number[]): (number | null)[] => {
    const powers = at.map((v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6 ? v : null));
    return powers.filter((v) => v !== null).length > 1 ? powers : at;
  };
  return { filter, grid: { ...axis.grid, filter }, ticks: { ...axis.ticks, filter } };
}

export function Chart({ steps, lines, band, log = false, height = 210, mark = null, xLabel, sync, broken, xName = "step" }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const dark = useDark();
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const axis = { stroke: ink("--ink-2"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--grid"), size: 4 }, font: '11px system-ui, sans-serif' };
    const drawMark = (plot: uPlot): void => {
      if (!mark) return;
      const x = plot.valToPos(mark.x, "x", true);
      const { ctx, bbox } = plot;
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.save();
      ctx.strokeStyle = ink("--mark");
      ctx.fillStyle = ink("--mark");
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      const right = x + ctx.measureText(mark.text).width + 8 * devicePixelRatio > bbox.left + bbox.width;
      ctx.textAlign = right ? "right" : "left";
      ctx.fillText(mark.text, x + (right ? -6 : 6) * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
      ctx.restore();
    };
    const drawBroken = (plot: uPlot): void => {
      const { ctx, bbox } = plot;
      for (const [from, to] of broken ?? []) {
        const left = Math.max(bbox.left, plot.valToPos(from, "x", true));
        const right = Math.max(left + 2, Math.min(bbox.left + bbox.width, plot.valToPos(to, "x", true)));
        ctx.fillStyle = ink("--bad-soft");
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        ctx.fillStyle = ink("--bad");
        ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        const fits = ctx.measureText("NaN or inf").width + 8 < right - left;
        ctx.textAlign = fits ? "center" : "right";
        ctx.fillText("NaN or inf", fits ? (left + right) / 2 : left - 5, bbox.top + bbox.height / 2);
      }
    };
    const options: uPlot.Options = {
      width: element.clientWidth,
      height,
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 30, ...(xLabel ? { space: 96, values: (_: uPlot, at: number[]) => at.map(xLabel) } : { values: (_: uPlot, at: number[]) => at.map((v) => (Number.isInteger(v) ? v.toLocaleString("en-US") : "")) }) },
        { ...axis, ...(log ? powersOnly(axis) : {}), size: 64, values: (_, at) => at.map((v) => (v === null ? "" : show(v))) },
      ],
      legend: { live: true },
      cursor: { points: { size: 6 }, ...(sync ? { sync: { key: sync } } : {}), drag: { x: true, y: false } },
      series: [
        { label: xName, value: (_, v) => (v === null || v === undefined ? "–" : xLabel ? xLabel(v) : v.toLocaleString("en-US")) },
        ...lines.map((line): uPlot.Series => ({
          label: line.label, stroke: line.colour, width: line.width ?? 1.5, ...(line.dash ? { dash: line.dash } : {}),
          points: { show: line.points ?? line.values.length < 60, size: 4 },
          value: (_, v) => (v === null || v === undefined ? "–" : show(v)), spanGaps: false,
        })),
      ],
      ...(band ? { bands: [{ series: [band[0] + 1, band[1] + 1], fill: ink("--band") }] } : {}),
      hooks: { drawClear: [drawBroken], draw: [drawMark] },
    };
    const data = [Array.from(steps), ...lines.map((line) => plain(line.values, log))] as uPlot.AlignedData;
    const plot = new uPlot(options, data, element);
    // With nobody pointing the legend tells the last values.
    let end = steps.length - 1;
    while (end > 0 && !Number.isFinite(lines[0]?.values[end])) end--;
    const rest = () => plot.setLegend({ idx: end });
    plot.over.addEventListener("mouseleave", rest);
    const later = requestAnimationFrame(rest); // not before uPlot has drawn for the first time
    const watcher = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    return () => {
      cancelAnimationFrame(later);
      watcher.disconnect();
      plot.destroy();
    };
  }, [steps, lines, band, log, dark, mark?.x, broken]);
  return <div class="chart" ref={box} />;
}
