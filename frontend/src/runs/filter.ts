// Which runs are wanted: words, and comparisons such as `lr > 0.001 and optimizer = adam`.

import type { RunLine } from "../types";

type Value = string | number | boolean | null;

// A column of a run by the name that is written in an expression: a fact of the run, else a label.
export function fact(run: RunLine, name: string): Value | string[] {
  switch (name) {
    case "name": return run.name;
    case "status": return run.status;
    case "steps": return run.steps;
    case "sites": return run.sites;
    case "size": return run.size;
    case "created": case "date": return run.created;
    case "loss": return Object.hasOwn(run.labels, "loss") ? run.labels["loss"] ?? null : run.loss ? spelled(run.loss.last) : null;
    case "duration": return run.seconds;
    case "findings": return run.findings ? run.findings.errors + run.findings.warnings : null;
    case "errors": return run.findings?.errors ?? null;
    case "tag": case "tags": return run.tags;
    default: return Object.hasOwn(run.labels, name) ? run.labels[name] ?? null : valueOf(run, name);
  }
}

export const STATISTICS = ["last", "best", "min", "max"] as const;
export const spelled = (value: number | string): number => (typeof value === "number" ? value : value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN);

// A logged value by its name, `last:`, `best:`, `min:` or `max:` in front; null where it was not logged.
function valueOf(run: RunLine, name: string): Value {
  const cut = name.indexOf(":");
  const statistic = STATISTICS.findIndex((s) => s === name.slice(0, cut));
  const key = statistic < 0 ? name : name.slice(cut + 1);
  const found = Object.hasOwn(run.values, key) ? run.values[key]?.[Math.max(0, statistic)] ?? null : null;
  return found === null ? null : spelled(found);
}

type Test = (run: RunLine) => boolean;

function compare(found: Value, sign: string, wanted: string): boolean {
  if (found === null) return sign === "!=";
  const text = String(found).toLowerCase();
  const word = wanted.toLowerCase();
  if (sign === "~") return text.includes(word);
  const a = typeof found === "number" ? found : Number(found);
  const b = Number(wanted);
  const numbers = typeof found !== "boolean" && wanted !== "" && Number.isFinite(b) && !Number.isNaN(a);
  if (sign === "=") return numbers ? a === b : text === word;
  if (sign === "!=") return numbers ? a !== b : text !== word;
  if (!numbers) return sign.startsWith("<") ? text < word || (sign === "<=" && text === word) : text > word || (sign === ">=" && text === word);
  return sign === "<" ? a < b : sign === "<=" ? a <= b : sign === ">" ? a > b : a >= b;
}

function term(text: string): Test {
  const parts = /^([^<>=!~\s]+)\s*(<=|>=|!=|==?|<|>|~)\s*(.*)$/.exec(text.trim());
  if (!parts) {
    const word = text.trim().toLowerCase();
    return (run) => [run.name, run.status, ...run.tags, ...Object.entries(run.labels).map(([k, v]) => `${k}=${v}`)].some((t) => t.toLowerCase().includes(word));
  }
  const [, name = "", sign = "=", raw = ""] = parts;
  const wanted = raw.replace(/^(["'])(.*)\1$/, "$2").trim();
  return (run) => {
    const found = fact(run, name);
    const plain = sign === "==" ? "=" : sign;
    if (Array.isArray(found)) return plain === "!=" ? found.every((f) => compare(f, plain, wanted)) : found.some((f) => compare(f, plain, wanted));
    return compare(found, plain, wanted);
  };
}

// `and` binds closer than `or`; words without a sign between them must all be there.
export function filterOf(text: string): Test {
  const wanted = text.trim();
  if (!wanted) return () => true;
  const any = wanted.split(/\s+or\s+|\|\|/i).map((side) => {
    const all = side.split(/\s+and\s+|&&/i).flatMap((part) => (/[<>=~]/.test(part) ? [part] : part.trim().split(/\s+/))).filter((p) => p.trim()).map(term);
    return (run: RunLine) => all.every((test) => test(run));
  });
  return (run) => any.some((test) => test(run));
}
