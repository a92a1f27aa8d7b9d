// The address carries the view: everything that matters for the picture is in the hash.

import { useEffect, useState } from "preact/hooks";

export type ViewName = "map" | "site" | "attention" | "compare" | "findings";
export const VIEWS: ViewName[] = ["map", "site", "attention", "compare", "findings"];

export interface Route {
  view: ViewName;
  params: Record<string, string>;
}

function parse(): Route {
  const [path = "", search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const view = VIEWS.find((name) => name === path) ?? "map";
  return { view, params: Object.fromEntries(new URLSearchParams(search)) };
}

export function href(view: ViewName, params: Record<string, string | number | null | undefined>): string {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const search = new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
  return `#/${view}${search ? `?${search}` : ""}`;
}

const listeners = new Set<() => void>();
window.addEventListener("hashchange", () => listeners.forEach((tell) => tell()));

export function go(view: ViewName, params: Record<string, string | number | null | undefined>): void {
  location.hash = href(view, params);
}

// Change parameters of the view that is shown; no entry in the history, since a slider would make hundreds.
export function adjust(changes: Record<string, string | number | null | undefined>): void {
  const { view, params } = parse();
  history.replaceState(null, "", href(view, { ...params, ...changes }));
  listeners.forEach((tell) => tell());
}

export function useRoute(): Route {
  const [route, setRoute] = useState(parse);
  useEffect(() => {
    const tell = () => setRoute(parse());
    listeners.add(tell);
    return () => void listeners.delete(tell);
  }, []);
  return route;
}

// The token has done its work once the page is loaded (a cookie carries it on): keep it out of screenshots.
if (new URLSearchParams(location.search).has("token")) {
  history.replaceState(null, "", location.pathname + location.hash);
}
