// The columns of the table: facts that every run has, and the labels that differ between runs.

import { grouped, show } from "../numbers";
import type { RunLine } from "../types";
import { fact } from "./filter";

export interface Column {
  key: string;
  title: string;
  number: boolean;
}

const FIXED: Column[] = [
  { key: "name", title: "run", number: false },
  { key: "status", title: "status", number: false },
  { key: "steps", title: "steps", number: true },
  { key: "loss", title: "last loss", number: true },
  { key: "findings", title: "findings", number: true },
  { key: "created", title: "date", number: false },
  { key: "size", title: "size", number: true },
];
const MOST_LABELS = 12;

// Labels that tell runs apart come first; one that all share says nothing.
export function columnsOf(runs: RunLine[]): Column[] {
  const values = new Map<string, Set<string>>();
  const numbers = new Map<string, boolean>();
  for (const run of runs) {
    for (const [key, value] of Object.entries(run.labels)) {
      const seen = values.get(key) ?? new Set<string>();
      if (seen.size < 50) seen.add(String(value));
      values.set(key, seen);
      numbers.set(key, (numbers.get(key) ?? true) && typeof value === "number");
    }
  }
  const labels = [...values].sort(([a, x], [b, y]) => Number(y.size > 1) - Number(x.size > 1) || (a < b ? -1 : 1)).slice(0, MOST_LABELS);
  return [...FIXED, ...labels.map(([key]) => ({ key, title: key, number: numbers.get(key) ?? false }))];
}

export function sorted(runs: RunLine[], key: string, down: boolean): RunLine[] {
  const value = (run: RunLine) => fact(run, key);
  const turn = down ? -1 : 1;
  return runs.map((run, at) => ({ run, at, v: value(run) })).sort((a, b) => {
    const missing = (v: unknown) => v === null || v === "" || (typeof v === "number" && Number.isNaN(v));
    if (missing(a.v) || missing(b.v)) return Number(missing(a.v)) - Number(missing(b.v)) || a.at - b.at; // always last
    if (typeof a.v === "number" && typeof b.v === "number") return turn * (a.v - b.v) || a.at - b.at;
    return turn * String(a.v).localeCompare(String(b.v), undefined, { numeric: true }) || a.at - b.at;
  }).map(({ run }) => run);
}

export function cell(run: RunLine, column: Column): string {
  const value = fact(run, column.key);
  if (value === null) return "";
  if (column.key === "created") return date(String(value));
  if (column.key === "size") return bytes(Number(value));
  if (column.key === "steps") return grouped(Number(value));
  return typeof value === "number" ? show(value) : String(value);
}

export function date(text: string): string {
  const when = new Date(text);
  if (Number.isNaN(when.getTime())) return text;
  return when.toLocaleString(undefined, { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
}

export function bytes(size: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let left = size;
  while (left >= 999.5 && unit < units.length - 1) { left /= 1000; unit++; }
  return `${unit === 0 ? left : Number(left.toPrecision(3))} ${units[unit] ?? ""}`;
}
