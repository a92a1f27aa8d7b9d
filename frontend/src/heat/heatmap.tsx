// The map itself: draws, follows the pointer and the keys, zooms.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { lines } from "../colour";
import { pictureShown } from "../data";
import { grouped, show } from "../numbers";
import type { Scale } from "../scale";
import { ink } from "../theme";
import { context2d, drawCells, drawNames, drawProfile, drawSeries, drawSteps, FONT, frameFor, type Frame, type Spot } from "./draw";
import { paint, type Cells, type Grid, type Part } from "./grid";

export interface Flag {
  row: number; // in the whole map
  step: number;
  text: string;
  grave: boolean;
}

interface Props {
  grid: Grid;
  bad: Grid | null;
  scale: Scale;
  part: Part;
  names: (row: number) => string; // of a row of the grid
  sites: (row: number) => string[];
  flags: Flag[];
  statistic: string;
  dark: boolean;
  zoom: (part: Part) => void;
  open: (site: string, step: number) => void;
}

export function HeatMap(props: Props) {
  const { grid, bad, scale, part, flags, dark } = props;
  const box = useRef<HTMLDivElement>(null);
  const base = useRef<HTMLCanvasElement>(null);
  const over = useRef<HTMLCanvasElement>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  const [spot, setSpot] = useState<Spot | null>(null);
  const [pointer, setPointer] = useState<{ x: number; y: number } | null>(null);
  const [drag, setDrag] = useState<{ x: number; y: number; toX: number; toY: number } | null>(null);
  const names = useMemo(() => Array.from({ length: grid.rows }, (_, row) => props.names(row)), [grid]);
  const picture = useMemo(() => paint(grid, bad, scale), [grid, bad, scale]);
  const cells = useMemo(() => grid.under(part), [grid, part.from, part.to, part.top, part.bottom]);
  const frame = useMemo(() => {
    const probe = document.createElement("canvas").getContext("2d");
    if (probe) probe.font = FONT;
    const widest = Math.max(60, ...names.map((name) => (probe ? probe.measureText(name).width : name.length * 6)));
    return frameFor(size.width, size.height, Math.min(widest + 20, Math.max(120, size.width * 0.24)));
  }, [size, names]);
  const shown = spot ?? resting(grid, cells, flags);

  useLayoutEffect(() => {
    if (!box.current) return;
    const look = () => box.current && setSize({ width: box.current.clientWidth, height: box.current.clientHeight });
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current);
    look();
    return () => watcher.disconnect();
  }, []);

  // At once with the new size: a canvas that waits for the next frame is stretched until then.
  useLayoutEffect(() => {
    const context = base.current && context2d(base.current, size.width, size.height);
    if (!context || size.width === 0) return;
    drawCells(context, frame, picture, cells);
    drawNames(context, frame, names, cells);
    drawSteps(context, frame, grid, cells);
    pictureShown();
    if (box.current) box.current.dataset["range"] = `${grid.steps[0] ?? ""}-${grid.facts.lastStep ?? ""}`;
    if (box.current) box.current.dataset["drawn"] = `${grid.facts.statistic}:${grid.facts.revision}:${grid.columns}x${grid.rows}`;
  }, [frame, picture, cells, dark]);

  useLayoutEffect(() => {
    const context = over.current && context2d(over.current, size.width, size.height);
    if (!context || size.width === 0) return;
    const colour = lines(dark)[0] ?? "";
    drawSeries(context, frame, grid, cells, shown, scale, `${names[shown.row] ?? ""} over time`, colour);
    drawProfile(context, frame, grid, cells, shown, scale, `at step ${grouped(grid.steps[shown.column] ?? 0)}`, colour);
    drawFlags(context, frame, grid, cells, flags);
    if (spot) drawCross(context, frame, cells, spot);
    if (drag) drawSelection(context, frame, drag);
  }, [frame, grid, cells, scale, spot, drag, flags, dark]);

  const find = (x: number, y: number): Spot | null => {
    const column = cells.left + Math.floor(((x - frame.left) / frame.cellsWidth) * (cells.right - cells.left));
    const row = cells.top + Math.floor(((y - frame.top) / frame.cellsHeight) * (cells.bottom - cells.top));
    const inside = y >= frame.top && y < frame.top + frame.cellsHeight && x < frame.left + frame.cellsWidth;
    return inside ? { row, column: Math.max(cells.left, Math.min(cells.right - 1, column)) } : null;
  };
  const openAt = (at: Spot) => {
    const site = props.sites(at.row)[0];
    if (site) props.open(site, grid.steps[at.column] ?? 0);
  };
  const rowOf = (row: number): number => grid.facts.firstRow + (grid.rowStarts[row] ?? grid.facts.shownRows);

  const release = (event: PointerEvent) => {
    if (!drag) return;
    setDrag(null);
    const from = find(Math.max(frame.left, Math.min(drag.x, drag.toX)), Math.max(frame.top, Math.min(drag.y, drag.toY)));
    const right = Math.min(frame.left + frame.cellsWidth - 1, Math.max(drag.x, drag.toX));
    const low = Math.min(frame.top + frame.cellsHeight - 1, Math.max(drag.y, drag.toY));
    const to = find(right, low);
    const moved = Math.hypot(drag.toX - drag.x, drag.toY - drag.y) > 6;
    if (!moved) {
      const at = find(event.offsetX, event.offsetY);
      if (at) openAt(at);
    } else if (from && to) {
      const next: Part = { from: grid.steps[from.column] ?? null, to: grid.lastStepOf(to.column), top: rowOf(from.row), bottom: rowOf(to.row + 1) };
      // A flat or a thin selection means one direction only.
      if (Math.abs(drag.toY - drag.y) < 8) Object.assign(next, { top: part.top, bottom: part.bottom });
      if (Math.abs(drag.toX - drag.x) < 8) Object.assign(next, { from: part.from, to: part.to });
      props.zoom(next);
      setSpot(null);
    }
  };

  const wheel = (event: WheelEvent) => {
    const at = find(event.offsetX, event.offsetY);
    if (!at) return;
    event.preventDefault();
    const factor = event.deltaY + event.deltaX > 0 ? 1.3 : 1 / 1.3;
    if (event.shiftKey) {
      const total = grid.facts.rows;
      const [top, bottom] = stretch(part.top ?? 0, part.bottom ?? total, rowOf(at.row), factor, 0, total, 2);
      props.zoom({ ...part, top: Math.round(top), bottom: Math.round(bottom) });
    } else {
      const first = part.from ?? grid.steps[0] ?? 0;
      const last = part.to ?? grid.facts.lastStep ?? 0;
      const [from, to] = stretch(first, last, grid.steps[at.column] ?? 0, factor, -Infinity, Infinity, 2);
      props.zoom({ ...part, from: Math.floor(from), to: Math.ceil(to) });
    }
  };

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea")) return;
      const moves: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = moves[event.key];
      if (move) {
        event.preventDefault();
        const stride = event.shiftKey ? 10 : 1;
        setPointer(null);
        setSpot({
          row: Math.max(cells.top, Math.min(cells.bottom - 1, shown.row + move[0] * stride)),
          column: Math.max(cells.left, Math.min(cells.right - 1, shown.column + move[1] * stride)),
        });
      } else if (event.key === "Enter" && spot) openAt(spot);
      else if (event.key === "Escape") {
        setSpot(null);
        setDrag(null);
        props.zoom({ from: null, to: null, top: null, bottom: null });
      }
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  useEffect(() => {
    const element = over.current;
    element?.addEventListener("wheel", wheel, { passive: false });
    return () => element?.removeEventListener("wheel", wheel);
  });

  return (
    <div class="heatmap" ref={box}>
      <canvas ref={base} style={{ width: `${size.width}px`, height: `${size.height}px` }} />
      <canvas
        ref={over} role="img" aria-label="Depth by time map" data-testid="map" style={{ width: `${size.width}px`, height: `${size.height}px` }}
        onPointerMove={(e) => {
          setPointer({ x: e.offsetX, y: e.offsetY });
          setSpot(find(e.offsetX, e.offsetY));
          if (drag) setDrag({ ...drag, toX: e.offsetX, toY: e.offsetY });
        }}
        onPointerLeave={() => { setSpot(null); setPointer(null); }}
        onPointerDown={(e) => {
          if (e.button !== 0 || !find(e.offsetX, e.offsetY)) return;
          e.currentTarget.setPointerCapture(e.pointerId);
          setDrag({ x: e.offsetX, y: e.offsetY, toX: e.offsetX, toY: e.offsetY });
        }}
        onPointerUp={release}
        onDblClick={() => props.zoom({ from: null, to: null, top: null, bottom: null })}
      />
      {spot && <Tip {...props} spot={spot} frame={frame} cells={cells} pointer={pointer} />}
    </div>
  );
}

function Tip({ grid, bad, scale, statistic, sites, spot, frame, cells, pointer }: Props & { spot: Spot; frame: Frame; cells: Cells; pointer: { x: number; y: number } | null }) {
  const at = spot.row * grid.columns + spot.column;
  const low = grid.low[at] ?? NaN;
  const high = grid.high[at] ?? NaN;
  const first = grid.steps[spot.column] ?? 0;
  const last = grid.lastStepOf(spot.column);
  const under = sites(spot.row);
  const broken = bad && bad.rows === grid.rows && bad.columns === grid.columns ? bad.high[at] ?? 0 : 0;
  const x = pointer?.x ?? frame.left + ((spot.column - cells.left + 0.5) / (cells.right - cells.left)) * frame.cellsWidth;
  const y = pointer?.y ?? frame.top + ((spot.row - cells.top + 0.5) / (cells.bottom - cells.top)) * frame.cellsHeight;
  const toLeft = x > frame.width - 300;
  const alone = Number.isNaN(low) || low === high;
  const several = grid.facts.shownSteps > grid.columns && last > first;
  return (
    <div class="tip" style={{ left: `${x + (toLeft ? -14 : 14)}px`, top: `${Math.min(y + 14, frame.height - 96)}px`, transform: toLeft ? "translateX(-100%)" : "" }}>
      <b>{under[0]}{under.length > 1 && <span class="quiet"> and {under.length - 1} more</span>}</b>
      <span>{several ? `steps ${grouped(first)} to ${grouped(last)}` : `step ${grouped(first)}`}</span>
      <span>
        <i class="swatch" style={{ background: Number.isNaN(low) ? ink("--absent") : `rgb(${swatch(scale, grid.value(spot.row, spot.column, grid.usual(scale), scale))})` }} />
        {statistic} {alone ? (Number.isNaN(low) ? "not recorded" : show(low)) : `${show(low)} to ${show(high)}`}
      </span>
      {broken > 0 && <span class="bad">{grouped(broken)} NaN or inf</span>}
    </div>
  );
}

function swatch(scale: Scale, value: number): string {
  const i = Math.round(scale.place(value) * 255) * 3;
  return `${scale.lut[i]},${scale.lut[i + 1]},${scale.lut[i + 2]}`;
}

// Where the cross-hair is when nobody points: at what was found, else in the middle of the last step.
function resting(grid: Grid, cells: Cells, flags: Flag[]): Spot {
  const flag = flags.find((f) => f.row >= grid.facts.firstRow && f.row < grid.facts.firstRow + grid.facts.shownRows);
  if (flag) return { row: grid.rowAt(flag.row), column: grid.columnAt(flag.step) };
  return { row: (cells.top + cells.bottom) >> 1, column: cells.right - 1 };
}

function stretch(low: number, high: number, about: number, factor: number, least: number, most: number, smallest: number): [number, number] {
  if ((high - low) * factor < smallest) return [low, high];
  return [Math.max(least, about - (about - low) * factor), Math.min(most, about + (high - about) * factor)];
}

function drawCross(context: CanvasRenderingContext2D, frame: Frame, cells: Cells, spot: Spot): void {
  const width = frame.cellsWidth / (cells.right - cells.left);
  const height = frame.cellsHeight / (cells.bottom - cells.top);
  const x = frame.left + (spot.column - cells.left + 0.5) * width;
  const y = frame.top + (spot.row - cells.top + 0.5) * height;
  for (const [colour, line] of [["rgba(0,0,0,.55)", 3], ["rgba(255,255,255,.9)", 1]] as const) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.beginPath();
    context.moveTo(x, frame.top);
    context.lineTo(x, frame.top + frame.cellsHeight);
    context.moveTo(frame.left, y);
    context.lineTo(frame.left + frame.cellsWidth, y);
    context.stroke();
  }
}

function drawSelection(context: CanvasRenderingContext2D, frame: Frame, drag: { x: number; y: number; toX: number; toY: number }): void {
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
function drawFlags(context: CanvasRenderingContext2D, frame: Frame, grid: Grid, cells: Cells, flags: Flag[]): void {
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
