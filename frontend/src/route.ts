// The address carries the view: everything that matters for the picture is in the hash.

import { outside } from "./outside";

export type ViewName = "runs" | "scalars" | "map" | "site" | "attention" | "changes" | "compare" | "findings" | "ranks";
export const VIEWS: ViewName[] = ["runs", "scalars", "map", "site", "attention", "changes", "compare", "findings", "ranks"];
export type Changes = Record<string, string | number | null | undefined>;

export interface Route {
  view: ViewName | null; // null: the address names none
  params: Record<string, string>;
}

function parse(): Route {
  const [path = "", search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const view = VIEWS.find((name) => name === path) ?? null;
  return { view, params: Object.fromEntries(new URLSearchParams(search)) };
}

export function href(view: ViewName, params: Changes): string {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const search = new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
  return `#/${view}${search ? `?${search}` : ""}`;
}

const address = outside(parse);
export const useRoute = address.use;
window.addEventListener("hashchange", address.changed);

export function go(view: ViewName, params: Changes): void {
  location.hash = href(view, params);
}

// Change parameters of the view that is shown; no entry in the history, since a slider would make hundreds.
export function adjust(changes: Changes): void {
  const { view, params } = parse();
  history.replaceState(null, "", href(view ?? usual, { ...params, ...changes }));
  address.changed();
}

// What is shown where the address names no view: the table of several runs, the map of one.
let usual: ViewName = "map";
export const setUsual = (view: ViewName): void => { usual = view; };

// The address as it is, token included: whoever gets it sees the same picture.
export const link = (): string => location.href;

// Several names in one parameter: a comma inside a name is escaped.
export const joinNames = (names: string[]): string => names.map((n) => n.replace(/[\\,]/g, "\\$&")).join(",");
export const splitNames = (text: string | undefined): string[] =>
  text ? (text.match(/(?:\\.|[^,\\])+/g) ?? []).map((n) => n.replace(/\\(.)/g, "$1")) : [];

export const whole = (text: string | undefined): number | null => (text === undefined || text === "" || !Number.isFinite(Number(text)) ? null : Number(text));
