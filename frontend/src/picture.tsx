// A two-dimensional slice as an image: crisp cells, the value under the cursor, optional labels on both axes.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { diverging, NOT_FINITE, sequential } from "./colour";
import { context2d } from "./heat/draw";
import { exactly } from "./numbers";
import { Take } from "./take/menu";
import { csv } from "./take/save";
import { SvgPen, type Pen } from "./take/svg";
import { ink, useDark } from "./theme";
import type { Packed } from "./wire";

export interface SliceFacts {
  shape: number[];
  dtype: string;
  pictures: number;
  rows: number;
  columns: number;
  firstRow: number;
  firstColumn: number;
  cellRows: number;
  cellColumns: number;
  exact: boolean;
  least?: number;
  greatest?: number;
  nans: number;
  infs: number;
}

export type Slice = Packed<SliceFacts>;

export interface Colours {
  lut: Uint8Array;
  low: number;
  high: number;
  bend?: number; // below one, small values get more of the colours
}

// Around zero where there are both signs, else from the least to the greatest; of this slice or of given ends.
export function coloursFor(slice: Slice, dark: boolean, ends?: [number, number] | null): Colours {
  const low = ends?.[0] ?? slice.facts.least ?? 0;
  const high = ends?.[1] ?? slice.facts.greatest ?? 1;
  if (low < 0 && high > 0) {
    const end = Math.max(-low, high);
    return { lut: diverging(dark), low: -end, high: end };
  }
  return { lut: sequential, low, high: high > low ? high : low + 1 };
}

export function paintSlice(slice: Slice, picture: number, colours: Colours): HTMLCanvasElement {
  const { cellRows, cellColumns } = slice.facts;
  const canvas = document.createElement("canvas");
  canvas.width = cellColumns;
  canvas.height = cellRows;
  const context = canvas.getContext("2d");
  const low = slice.arrays["low"];
  const high = slice.arrays["high"];
  if (!context || !low) return canvas;
  const image = context.createImageData(cellColumns, cellRows);
  const start = picture * cellRows * cellColumns;
  const there = slice.arrays["there"]; // what was not recorded stays transparent
  const middle = (colours.low + colours.high) / 2;
  for (let i = 0; i < cellRows * cellColumns; i++) {
    if (there && !there[start + i]) continue;
    const least = low[start + i] ?? NaN;
    const most = high ? high[start + i] ?? NaN : least;
    const value = Math.abs(most - middle) >= Math.abs(least - middle) ? most : least;
    if (Number.isFinite(value)) {
      const t = (value - colours.low) / (colours.high - colours.low);
      const at = Math.round(Math.min(1, Math.max(0, t)) ** (colours.bend ?? 1) * 255) * 3;
      image.data.set([colours.lut[at] ?? 0, colours.lut[at + 1] ?? 0, colours.lut[at + 2] ?? 0, 255], i * 4);
    } else {
      image.data.set([...NOT_FINITE, 255], i * 4);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

interface Props {
  slice: Slice;
  picture?: number;
  colours?: Colours;
  width: number;
  height: number;
  rowLabels?: string[] | null;
  columnLabels?: string[] | null;
  describe?: (row: number, column: number) => string;
  said?: (text: string | null) => void;
  name: string; // of the files that are saved
}

const LABELS = 92;

export function Picture({ slice, picture = 0, colours, width, height, rowLabels, columnLabels, describe, said, name }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = useDark();
  const [at, setAt] = useState<[number, number] | null>(null);
  const { cellRows, cellColumns, rows, columns } = slice.facts;
  const image = useMemo(() => paintSlice(slice, picture, colours ?? coloursFor(slice, dark)), [slice, picture, colours?.lut, colours?.low, colours?.high, dark]);
  const left = rowLabels ? LABELS : 40;
  const top = columnLabels ? LABELS : 20;
  // Square cells where that leaves a readable picture; a long thin slice is stretched instead.
  const room = { width: width - left - 2, height: height - top - 2 };
  const cell = Math.min(room.width / cellColumns, room.height / cellRows, 48);
  const thin = cellRows / cellColumns > 8 || cellColumns / cellRows > 8;
  const drawnWidth = thin ? Math.min(room.width, cellColumns * 48) : cellColumns * cell;
  const drawnHeight = thin ? Math.min(room.height, Math.max(cellRows * cell, Math.min(cellRows * 48, 48))) : cellRows * cell;

  const draw = (context: Pen) => {
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, top, drawnWidth, drawnHeight);
    context.strokeStyle = ink("--line");
    context.strokeRect(left - 0.5, top - 0.5, drawnWidth + 1, drawnHeight + 1);
    context.fillStyle = ink("--ink-2");
    axis(context, rowLabels ?? null, slice.facts.firstRow, rows, cellRows, drawnHeight, (y, text) => {
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(text, left - 6, top + y);
    });
    axis(context, columnLabels ?? null, slice.facts.firstColumn, columns, cellColumns, drawnWidth, (x, text) => {
      context.save();
      context.translate(left + x, top - 6);
      if (columnLabels) context.rotate(-Math.PI / 3);
      context.textAlign = columnLabels ? "left" : "center";
      context.textBaseline = columnLabels ? "middle" : "bottom";
      context.fillText(text, 0, 0);
      context.restore();
    });
  };
  useEffect(() => {
    const context = canvas.current && context2d(canvas.current, left + drawnWidth + 2, top + drawnHeight + 2);
    if (!context) return;
    draw(context);
    if (at) {
      context.strokeStyle = ink("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(left + (at[1] / cellColumns) * drawnWidth, top + (at[0] / cellRows) * drawnHeight, drawnWidth / cellColumns, drawnHeight / cellRows);
    }
  }, [image, drawnWidth, drawnHeight, rowLabels, columnLabels, at, dark]);
  const svg = () => {
    const pen = new SvgPen(left + drawnWidth + 2, top + drawnHeight + 2, ink("--paper"));
    draw(pen);
    return pen.text();
  };
  const table = () => csv(["row", ...Array.from({ length: cellColumns }, (_, c) => columnLabels?.[c] ?? String(slice.facts.firstColumn + Math.floor((c * columns) / cellColumns)))],
    Array.from({ length: cellRows }, (_, r) => [rowLabels?.[r] ?? String(slice.facts.firstRow + Math.floor((r * rows) / cellRows)), ...Array.from(slice.arrays["low"]?.subarray((picture * cellRows + r) * cellColumns, (picture * cellRows + r + 1) * cellColumns) ?? [])]));

  const move = (row: number, column: number) => {
    const r = Math.max(0, Math.min(cellRows - 1, row));
    const c = Math.max(0, Math.min(cellColumns - 1, column));
    setAt([r, c]);
    const index = (picture * cellRows + r) * cellColumns + c;
    const low = slice.arrays["low"]?.[index] ?? NaN;
    const high = slice.arrays["high"]?.[index];
    const firstRow = slice.facts.firstRow + Math.floor((r * rows) / cellRows);
    const firstColumn = slice.facts.firstColumn + Math.floor((c * columns) / cellColumns);
    const place = describe ? describe(firstRow, firstColumn) : `[${firstRow}, ${firstColumn}]`;
    const single = slice.arrays["low"] instanceof Float32Array;
    said?.(high === undefined || high === low ? `${place} = ${exactly(low, single)}` : `${place} … from ${exactly(low, single)} to ${exactly(high, single)}`);
  };
  return (
    <div class="pictured">
    <Take name={name} png={() => (canvas.current ? [canvas.current] : [])} svg={svg} csv={table} />
    <canvas
      ref={canvas} class="picture" tabIndex={0} role="img" aria-label="Tensor slice" data-testid="picture"
      data-left={left} data-top={top} data-cell-width={drawnWidth / cellColumns} data-cell-height={drawnHeight / cellRows}
      style={{ width: `${left + drawnWidth + 2}px`, height: `${top + drawnHeight + 2}px` }}
      onPointerMove={(e) => {
        const inside = e.offsetX >= left && e.offsetY >= top && e.offsetX < left + drawnWidth && e.offsetY < top + drawnHeight;
        if (!inside) return;
        move(Math.floor(((e.offsetY - top) / drawnHeight) * cellRows), Math.floor(((e.offsetX - left) / drawnWidth) * cellColumns));
      }}
      onPointerLeave={() => { setAt(null); said?.(null); }}
      onKeyDown={(e) => {
        const moves: Record<string, [number, number]> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
        const step = Object.hasOwn(moves, e.key) ? moves[e.key] : undefined;
        if (!step) return;
        e.preventDefault();
        e.stopPropagation();
        move((at?.[0] ?? 0) + (at ? step[0] : 0), (at?.[1] ?? 0) + (at ? step[1] : 0));
      }}
    />
    </div>
  );
}

// Every label that has room; numbers at round places.
function axis(context: Pen, labels: string[] | null, first: number, length: number, cells: number, size: number, write: (at: number, text: string) => void): void {
  const cell = size / cells;
  const each = length / cells;
  if (labels) {
    const stride = Math.max(1, Math.ceil(13 / cell));
    for (let i = 0; i < cells; i += stride) {
      let text = (labels[Math.floor(first + i * each)] ?? "").replace(/^[ĠĊ▁ ]/u, "").replace(/\n/g, "↵") || "␣";
      while (text.length > 1 && context.measureText(text).width > LABELS - 14) text = `${text.slice(0, -2)}…`;
      write((i + 0.5) * cell, text);
    }
    return;
  }
  const wanted = Math.max(1, Math.floor(size / 44));
  const rough = length / wanted;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const stride = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough);
  for (let i = Math.ceil(first / stride) * stride; i < first + length; i += stride) write((((i - first) + 0.5) / each) * cell, String(i));
}
