// Two runs compared along depth: where they part, one kind of site at a time.

import { useMemo } from "preact/hooks";
import { Chart, type Line } from "../chart";
import { lines as lineColours } from "../colour";
import { useJson } from "../data";
import { show } from "../numbers";
import { adjust, href } from "../route";
import { useDark } from "../theme";
import type { Comparison, RunLine } from "../types";
import { kindWord, siteWord } from "../words";

const CONFIDENCE: Record<string, string> = { low: "Confidence: low (statistics only)" };
const kindOf = (site: string): string => /^[^.#]*/.exec(site.slice(site.lastIndexOf(":") + 1))?.[0] ?? "";

export function Verdict({ runs, given, params, run }: { runs: RunLine[]; given: boolean; params: Record<string, string>; run: RunLine }) {
  const dark = useDark();
  const there = (name: string | undefined) => runs.find((r) => r.name === name)?.name;
  const a = there(params["a"]) ?? run.name;
  const b = there(params["b"]) ?? (runs.find((r) => r.name !== a && r.steps > 0) ?? runs.find((r) => r.name !== a))?.name ?? a;
  const saved = given && params["a"] === undefined;
  const result = useJson<Comparison>("comparison", saved ? {} : { a, b });
  const rows = result.value?.rows ?? [];
  const first = result.value?.first ?? null;
  const kinds = [...new Set(rows.map((r) => kindOf(r.site)))];
  const asked = params["depth"] ?? "";
  // One kind at a time: forward values and gradients have depths of their own.
  const kind = kinds.includes(asked) ? asked : first ? kindOf(first.site) : kinds[0] ?? "";
  const drawn = useMemo(() => {
    const colours = lineColours(dark);
    const shown = rows.filter((r) => kindOf(r.site) === kind);
    const errors = shown.map((r) => number(r.error));
    const floors = shown.map((r) => number(r.floor));
    const lines: Line[] = [{ label: "error", colour: colours[0] ?? "", values: errors, width: 2 }];
    if (floors.some(Number.isFinite)) lines.push({ label: "noise floor", colour: colours[1] ?? "", values: floors, dash: [6, 4] });
    return { shown, steps: shown.map((_, i) => i), lines };
  }, [result.value, kind, dark]);
  const at = first ? drawn.shown.findIndex((r) => r.site === first.site) : -1;
  const over = rows.filter((r) => r.status !== "equal" && r.status !== "within");
  const confidence = String(result.value?.["confidence"] ?? "");
  const open = (site: string) => href("site", { ...params, run: saved ? params["run"] : a, site });
  return (
    <div class="panel">
      <h2>Error along depth
        {saved
          ? <span class="quiet">{last(result.value?.target)} against {last(result.value?.reference)}</span>
          : <span class="tools inline">
              <select aria-label="Target" value={b} onChange={(e) => adjust({ a, b: e.currentTarget.value })}>{runs.map((r) => <option key={r.name} value={r.name}>{r.name}</option>)}</select>
              <span class="quiet">against</span>
              <select aria-label="Reference" value={a} onChange={(e) => adjust({ b, a: e.currentTarget.value })}>{runs.map((r) => <option key={r.name} value={r.name}>{r.name}</option>)}</select>
            </span>}
        {kinds.length > 1 && (
          <select aria-label="Depth of" value={kind} onChange={(e) => adjust({ depth: e.currentTarget.value })}>{kinds.map((k) => <option key={k} value={k}>{kindWord(k)}</option>)}</select>
        )}
        <span class="quiet">{result.value?.floor_basis ? `noise floor: ${result.value.floor_basis}` : ""}</span></h2>
      {result.busy && !result.value && <p class="quiet">Comparing …</p>}
      {result.error && <p class="quiet">{result.error}</p>}
      {result.value && <p class="verdict">{result.value.verdict}</p>}
      {confidence && <p class="quiet">{Object.hasOwn(CONFIDENCE, confidence) ? CONFIDENCE[confidence] : `Confidence: ${confidence}`}</p>}
      {first && <p><b>First divergence</b> <a href={open(first.site)}>{siteWord(first.site)}</a> <span class="quiet">error {show(number(first.error))}{first.floor ? `, noise floor ${show(number(first.floor))}` : ""}</span></p>}
      {drawn.shown.length > 0 && (
        <Chart
          name={`${b}-against-${a}`} steps={drawn.steps} lines={drawn.lines} log height={260} xName="site"
          xLabel={(v) => shortSite(drawn.shown[Math.round(v)]?.site, v)} mark={at >= 0 ? { x: at, text: "first divergence" } : null}
        />
      )}
      {over.length > 0 && (
        <div class="scroll" tabIndex={0} aria-label="Sites that differ"><table>
          <thead><tr><th>site</th><th class="number">error</th><th class="number">noise floor</th><th class="whole">status</th></tr></thead>
          <tbody>{over.slice(0, 200).map((r) => (
            <tr key={r.site}><td><a href={open(r.site)}>{siteWord(r.site)}</a></td><td class="number">{show(number(r.error))}</td><td class="number">{show(number(r.floor))}</td><td class="whole">{r.status}</td></tr>
          ))}</tbody>
        </table></div>
      )}
    </div>
  );
}

const last = (path: string | undefined): string => path?.split(/[\\/]/).pop() ?? "";

function number(value: number | string | null): number {
  if (typeof value === "number") return value;
  return value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN;
}

function shortSite(name: string | undefined, at: number): string {
  if (name === undefined || !Number.isInteger(at)) return "";
  const path = name.slice(0, name.lastIndexOf(":")) || "(model)";
  return path.length > 13 ? `…${path.slice(-12)}` : path;
}
