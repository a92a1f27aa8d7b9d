// What the server says, as the page sees it. The other side is src/torchtap/viewer/overview.py.

export interface RunLine {
  name: string;
  known: boolean; // false until the server has looked at it
  created: string;
  status: "recording" | "closed" | "interrupted" | "";
  revision: number;
  steps: number;
  first: number | null;
  last: number | null;
  sites: number;
  size: number;
  ranks: number;
  logged: string[];
  phases: string[];
  loss: { name: string; last: number | string; spark: (number | null)[]; broken: boolean } | null;
  values: Record<string, [last: number | string, best: number | null, least: number | null, greatest: number | null]>; // of each logged value
  seconds: number | null; // from the first record to the last
  labels: Record<string, string | number | boolean>;
  tags: string[];
  archived: boolean;
  findings: { errors: number; warnings: number; judged: boolean } | null;
  problem: string | null; // why it cannot be read
  damage: string | null; // what of it cannot be read
}

export interface RunsAnswer {
  viewer: string; // another one after a restart
  tick: number;
  pending: number; // runs that were not read yet
  judging: number; // runs whose findings are not known yet
  names: string[];
  runs: RunLine[];
  comparison: boolean;
  managed: boolean;
  folder: boolean;
}

export interface Site {
  name: string;
  module: string;
  kind: string;
  class: string;
  source: string;
  shape: number[] | null;
  dtype: string;
  statistics: number; // which of About.statistics
}

export interface Module {
  name: string;
  path: string;
  class: string;
  source: string;
  parameters: number | null;
  children: Module[];
}

export interface About {
  name: string;
  created: string;
  revision: number;
  sites: Site[];
  statistics: string[][];
  tensors: Record<string, string[]>;
  model: Module | null;
  environment: Record<string, string>;
  ranks: number[];
  phases: string[];
}

export type Mark = "nan" | "spread" | "warning"; // where a NaN began, where it went, anything else

export interface Evidence {
  name: string;
  value: number;
  site: string;
  step: number | null;
  points: (number | null)[]; // the series that the number is from
}

export interface Finding {
  kind: string;
  severity: "error" | "warning" | "info";
  site: string;
  step: number | null;
  value: number | null;
  message: string;
  advice: string;
  causes: string[]; // the likeliest first
  evidence: Evidence[];
  sites: string[];
  total: number;
}

export interface Findings {
  findings: Finding[];
  marks: Record<string, Mark>;
  verdict: "problem" | "healthy" | "not judged";
  summary: string; // what was judged, and what was not
  revision: number;
}

export interface TensorGroup {
  field: string;
  reduction: string;
  shape: number[];
  dtype: string;
  steps: number[];
}

export interface ComparisonRow {
  site: string;
  index: number;
  error: number | string | null; // "inf" and "nan" where JSON has no number
  floor: number | string | null;
  status: string;
  [key: string]: unknown;
}

export interface Comparison {
  [key: string]: unknown;
  reference?: string;
  target?: string;
  floor_basis?: string;
  compared?: number;
  rows: ComparisonRow[];
  first: ComparisonRow | null;
  verdict: string;
}
