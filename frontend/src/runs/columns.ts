// The columns of the table: facts that every run has, and the labels that differ between runs.

import { duration, grouped, show } from "../numbers";
import type { RunLine } from "../types";
import { fact, STATISTICS } from "./filter";

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
  { key: "duration", title: "duration", number: true },
  { key: "created", title: "date", number: false },
  { key: "size", title: "size", number: true },
];
const MOST_LABELS = 12;

// Columns of every logged value, in the order in which they were first logged.
export function valuesOf(runs: RunLine[]): string[] {
  return [...new Set(runs.flatMap((run) => Object.keys(run.values)))];
}

// The columns of the table: the fixed ones, labels, and the chosen statistics of logged values whose title has the words.
export function shownColumns(runs: RunLine[], statistics: string[], words: string): Column[] {
  const own = new Set(runs.flatMap((run) => (run.loss ? [run.loss.name] : [])));
  const values = valuesOf(runs).flatMap((name) => STATISTICS.filter((s) => statistics.includes(s) && !(s === "last" && own.size === 1 && own.has(name)) && (s !== "best" || runs.some((r) => typeof r.values[name]?.[1] === "number")))
    .map((s): Column => ({ key: `${s}:${name}`, title: `${s} ${name}`, number: true })));
  const wanted = words.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const kept = (column: Column) => wanted.length === 0 || column.key === "name" || wanted.some((word) => column.title.toLowerCase().includes(word));
  return [...columnsOf(runs), ...values].filter(kept);
}

// Labels that differ between runs: what a sweep went over.
export function varied(runs: RunLine[]): string[] {
  return columnsOf(runs).slice(FIXED.length).map((c) => c.key).filter((key) => new Set(runs.map((r) => String(r.labels[key]))).size > 1);
}

// The runs by the value of a label, in the order of the values; those without it last.
export function groupsOf(runs: RunLine[], key: string): [string, RunLine[]][] {
  const found = new Map<string, RunLine[]>();
  for (const run of runs) {
    const value = key === "tags" ? run.tags.join(", ") || null : fact(run, key);
    const name = value === null ? "not set" : typeof value === "number" ? show(value) : String(value);
    found.set(name, [...(found.get(name) ?? []), run]);
  }
  return [...found].sort(([a], [b]) => Number(a === "not set") - Number(b === "not set") || a.localeCompare(b, undefined, { numeric: true }));
}

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
    const missing = (v: unknown) => (v === null || v === "" ? 2 : typeof v === "number" && Number.isNaN(v) ? 1 : 0); // not logged after NaN
    if (missing(a.v) || missing(b.v)) return missing(a.v) - missing(b.v) || a.at - b.at; // always last
    if (typeof a.v === "number" && typeof b.v === "number") return turn * (a.v - b.v) || a.at - b.at;
    return turn * String(a.v).localeCompare(String(b.v), undefined, { numeric: true }) || a.at - b.at;
  }).map(({ run }) => run);
}

export function cell(run: RunLine, column: Column): string {
  const value = fact(run, column.key);
  if (value === null) return "";
  if (column.key === "duration") return duration(Number(value));
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
