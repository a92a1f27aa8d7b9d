// The map itself: draws, follows the pointer and the keys, zooms.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { lines } from "../colour";
import { pictureShown } from "../data";
import { grouped } from "../numbers";
import type { Scale } from "../scale";
import type { Pen } from "../take/svg";
import { siteWord } from "../words";
import { context2d, drawCells, drawNames, drawProfile, drawSeries, drawSteps, FONT, frameFor, type Frame, type Spot } from "./draw";
import { paint, type Cells, type Grid, type Part } from "./grid";
import { drawLoss, type LossColumns } from "./loss";
import { drawCross, drawFlags, drawSelection, type Drag, type Flag } from "./marks";
import { MapSave } from "./save";
import { Tip } from "./tip";

interface Props {
  grid: Grid;
  bad: Grid | null;
  scaleOf: (row: number) => Scale;
  loss: LossColumns | null;
  part: Part;
  nameOf: (row: number) => string; // of a row of the grid
  flags: Flag[];
  statistic: string;
  dark: boolean;
  zoom: (part: Part) => void;
  open: (site: string, module: string | null, step: number) => void;
}

const WHOLE: Part = { from: null, to: null, top: null, bottom: null };

export function HeatMap(props: Props) {
  const { grid, bad, scaleOf, loss, part, flags, dark, nameOf } = props;
  const box = useRef<HTMLDivElement>(null);
  const base = useRef<HTMLCanvasElement>(null);
  const over = useRef<HTMLCanvasElement>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  const [keyed, setKeyed] = useState<Spot | null>(null); // where the arrow keys went
  const [pointer, setPointer] = useState<{ x: number; y: number } | null>(null);
  const [drag, setDrag] = useState<Drag | null>(null);
  const names = useMemo(() => Array.from({ length: grid.rows }, (_, row) => nameOf(row)), [grid, nameOf]);
  const picture = useMemo(() => paint(grid, bad, scaleOf), [grid, bad, scaleOf]);
  const cells = useMemo(() => grid.under(part), [grid, part.from, part.to, part.top, part.bottom]);
  const frame = useMemo(() => {
    const probe = document.createElement("canvas").getContext("2d");
    if (probe) probe.font = FONT;
    const widest = Math.max(60, ...names.map((name) => (probe ? probe.measureText(name).width : name.length * 6)));
    const most = size.width < 520 ? size.width * 0.3 : Math.max(120, size.width * 0.24);
    return frameFor(size.width, size.height, Math.min(widest + 20, most), loss !== null);
  }, [size, names, loss !== null]);

  const find = (x: number, y: number): Spot | null => {
    const column = cells.left + Math.floor(((x - frame.left) / frame.cellsWidth) * (cells.right - cells.left));
    const row = cells.top + Math.floor(((y - frame.top) / frame.cellsHeight) * (cells.bottom - cells.top));
    const inside = y >= frame.top && y < frame.top + frame.cellsHeight && x < frame.left + frame.cellsWidth;
    return inside ? { row, column: Math.max(cells.left, Math.min(cells.right - 1, column)) } : null;
  };
  // Always from where the pointer is now: after a zoom something else lies under it.
  const spot = pointer ? find(pointer.x, pointer.y) : keyed && { row: Math.min(keyed.row, cells.bottom - 1), column: Math.min(keyed.column, cells.right - 1) };
  const shown = spot ?? resting(grid, cells, flags);

  useLayoutEffect(() => {
    if (!box.current) return;
    const look = () => box.current && setSize({ width: box.current.clientWidth, height: box.current.clientHeight });
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current);
    look();
    return () => watcher.disconnect();
  }, []);

  const drawBase = (pen: Pen): void => {
    drawCells(pen, frame, picture, cells);
    drawNames(pen, frame, names, cells);
    drawSteps(pen, frame, grid, cells);
    if (loss) drawLoss(pen, frame, cells, loss, lines(dark)[3] ?? "");
  };
  const drawOver = (pen: Pen): void => {
    const colour = lines(dark)[0] ?? "";
    drawSeries(pen, frame, grid, cells, shown, scaleOf(shown.row), `${names[shown.row] ?? ""} over time`, colour);
    drawProfile(pen, frame, grid, cells, shown, scaleOf, `at step ${grouped(grid.steps[shown.column] ?? 0)}`, colour);
    drawFlags(pen, frame, grid, cells, flags);
  };

  // At once with the new size: a canvas that waits for the next frame is stretched until then.
  useLayoutEffect(() => {
    const context = base.current && context2d(base.current, size.width, size.height);
    if (!context || size.width === 0) return;
    drawBase(context);
    pictureShown();
    const note = box.current?.dataset;
    if (!note) return;
    note["range"] = `${grid.steps[0] ?? ""}-${grid.facts.lastStep ?? ""}`;
    note["names"] = names.slice(0, 400).join(" | ");
    note["drawn"] = `${grid.facts.statistic}:${grid.facts.revision}:${grid.columns}x${grid.rows}`;
    note["frame"] = JSON.stringify(frame);
    note["loss"] = loss ? loss.name : "";
  }, [frame, picture, cells, dark, loss]);

  useLayoutEffect(() => {
    const context = over.current && context2d(over.current, size.width, size.height);
    if (!context || size.width === 0) return;
    drawOver(context);
    if (spot) drawCross(context, frame, cells, spot);
    if (drag) drawSelection(context, frame, drag);
  }, [frame, grid, cells, scaleOf, spot?.row, spot?.column, drag, flags, dark]);

  const openAt = (at: Spot) => {
    const site = grid.sitesOf(at.row)[0];
    if (site) props.open(site, grid.moduleOf(at.row), grid.steps[at.column] ?? 0);
  };
  const rowOf = (row: number): number => grid.facts.firstRow + (grid.rowStarts[row] ?? grid.facts.shownRows);

  const release = (event: PointerEvent) => {
    if (!drag) return;
    setDrag(null);
    const moved = Math.hypot(drag.toX - drag.x, drag.toY - drag.y) > 6;
    const next = moved ? selected(drag, frame, grid, part, find, rowOf) : null;
    if (next) props.zoom(next);
    else if (!moved) {
      const at = find(event.offsetX, event.offsetY);
      if (at) openAt(at);
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
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea, dialog, details")) return;
      const moves: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = Object.hasOwn(moves, event.key) ? moves[event.key] : undefined;
      if (move) {
        event.preventDefault();
        const stride = event.shiftKey ? 10 : 1;
        setPointer(null);
        setKeyed({
          row: Math.max(cells.top, Math.min(cells.bottom - 1, shown.row + move[0] * stride)),
          column: Math.max(cells.left, Math.min(cells.right - 1, shown.column + move[1] * stride)),
        });
      } else if (event.key === "Enter" && spot) openAt(spot);
      else if (event.key === "Escape") {
        setKeyed(null);
        setDrag(null);
        props.zoom(WHOLE);
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

  const style = { width: `${size.width}px`, height: `${size.height}px` };
  const said = spot ? `${siteWord(names[spot.row] ?? "")}, step ${grid.steps[spot.column] ?? ""}` : "";
  return (
    <div class="heatmap" ref={box}>
      <canvas ref={base} style={style} aria-hidden="true" />
      <canvas
        ref={over} role="img" aria-label={`Depth by time map of ${props.statistic}. ${said}`} data-testid="map" style={style}
        onPointerMove={(e) => {
          setKeyed(null);
          setPointer({ x: e.offsetX, y: e.offsetY });
          if (drag) setDrag({ ...drag, toX: e.offsetX, toY: e.offsetY });
        }}
        onPointerLeave={() => setPointer(null)}
        onPointerDown={(e) => {
          if (e.button !== 0 || !find(e.offsetX, e.offsetY)) return;
          e.currentTarget.setPointerCapture(e.pointerId);
          setDrag({ x: e.offsetX, y: e.offsetY, toX: e.offsetX, toY: e.offsetY });
        }}
        onPointerUp={release}
        onDblClick={() => props.zoom(WHOLE)}
      />
      <MapSave grid={grid} names={names} frame={frame} layers={() => [base.current, over.current].filter((c) => c !== null)} draw={(pen) => { drawBase(pen); drawOver(pen); }} />
      {spot && !drag && <Tip {...{ grid, bad, loss, spot, frame, cells, pointer }} statistic={props.statistic} scale={scaleOf(spot.row)} />}
    </div>
  );
}

// The part that was drawn around. A flat or a thin selection means one direction only.
function selected(drag: Drag, frame: Frame, grid: Grid, part: Part, find: (x: number, y: number) => Spot | null, rowOf: (row: number) => number): Part | null {
  const from = find(Math.max(frame.left, Math.min(drag.x, drag.toX)), Math.max(frame.top, Math.min(drag.y, drag.toY)));
  const right = Math.min(frame.left + frame.cellsWidth - 1, Math.max(drag.x, drag.toX));
  const low = Math.min(frame.top + frame.cellsHeight - 1, Math.max(drag.y, drag.toY));
  const to = find(right, low);
  if (!from || !to) return null;
  const next: Part = { from: grid.steps[from.column] ?? null, to: grid.lastStepOf(to.column), top: rowOf(from.row), bottom: rowOf(to.row + 1) };
  if (Math.abs(drag.toY - drag.y) < 8) Object.assign(next, { top: part.top, bottom: part.bottom });
  if (Math.abs(drag.toX - drag.x) < 8) Object.assign(next, { from: part.from, to: part.to });
  return next;
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
