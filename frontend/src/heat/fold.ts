// Rows as modules: a thousand sites are stripes, a hundred modules are names.

import type { About } from "../types";

const READABLE = 120; // rows that still have names
const FEW = 10; // fewer than that say too little
const MOST = 500;
const MANY = 160; // sites from which on rows are modules unless somebody says otherwise

// How many rows each depth of modules would give, for the sites that the map shows.
export function foldings(about: About, kind: string, under: string): number[] {
  const paths = about.sites.filter((s) => (!kind || s.kind === kind) && (!under || s.module === under || s.module.startsWith(`${under}.`))).map((s) => s.name.slice(0, s.name.lastIndexOf(":")).split("."));
  const deepest = Math.min(12, Math.max(0, ...paths.map((p) => p.length)));
  const found: number[] = [];
  for (let depth = 1; depth <= deepest; depth++) found.push(new Set(paths.map((p) => p.slice(0, depth).join("."))).size);
  return found;
}

// The depth that the address asks for; without one, the deepest that stays readable where there are many sites.
export function foldOf(text: string | undefined, counts: number[], sites: number): number | null {
  if (text === "none") return null;
  const asked = Number(text);
  if (text !== undefined && Number.isInteger(asked) && asked >= 1) return asked;
  if (sites <= MANY) return null;
  let best = 1;
  counts.forEach((count, i) => { if (count <= READABLE) best = i + 1; });
  const next = counts[best] ?? Infinity; // one level deeper
  return (counts[best - 1] ?? 0) < FEW && next <= MOST ? best + 1 : best;
}
