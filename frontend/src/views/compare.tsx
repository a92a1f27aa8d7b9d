// Several runs over each other; and, where two runs were compared, the error along depth.

import { useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { Chart, type Line } from "../chart";
import { lines as lineColours } from "../colour";
import { statisticsOf, useAnswer, useJson } from "../data";
import { show } from "../numbers";
import { adjust, href } from "../route";
import { usualScale } from "../scale";
import { useDark } from "../theme";
import type { Comparison, RunLine } from "../types";
import { statisticWord } from "../words";
import { usualStatistic } from "./map";

export function CompareView({ run, runs, about, params, given }: ViewProps & { given: boolean }) {
  const dark = useDark();
  const chosen = (params["with"]?.split(",").map(Number) ?? runs.map((r) => r.id)).filter((id) => runs.some((r) => r.id === id));
  const measured = useMemo(() => about.sites.filter((s) => (about.statistics[s.statistics] ?? []).length > 0), [about]);
  const site = measured.find((s) => s.name === params["site"]) ?? measured[0];
  const names = site ? statisticsOf(about, site.name) : [];
  const statistic = names.includes(params["statistic"] ?? "") ? params["statistic"] ?? "" : usualStatistic(names);
  const log = (params["scale"] ?? usualScale(statistic)) === "log";
  const colours = lineColours(dark);
  const toggle = (id: number) => adjust({ with: (chosen.includes(id) ? chosen.filter((c) => c !== id) : [...chosen, id].sort()).join(",") });
  if (runs.length < 2 && !given) {
    return (
      <section class="compare"><p class="quiet">
        One run is open. <code>torchtap view runs/a runs/b</code> lays several over each other.
      </p></section>
    );
  }
  return (
    <section class="compare" aria-label="Compare">
      {(given || (runs.length > 1 && live)) && <Verdict runs={runs} given={given} params={params} />}
      {runs.length > 1 && site && (
        <div class="panel">
          <h2>Over each other
            <span class="chips" role="group" aria-label="Runs">
              {runs.map((r, i) => (
                <button key={r.id} class="chip" aria-pressed={chosen.includes(r.id)} onClick={() => toggle(r.id)}>
                  <i class="swatch" style={{ background: colours[i % colours.length] ?? "" }} />{r.name}
                </button>
              ))}
            </span>
          </h2>
          <div class="tools">
            <label>Site
              <select aria-label="Site" value={site.name} onChange={(e) => adjust({ site: e.currentTarget.value })}>
                {measured.map((s) => <option key={s.name} value={s.name}>{s.name}</option>)}
              </select>
            </label>
            <label>by
              <select aria-label="Statistic" value={statistic} onChange={(e) => adjust({ statistic: e.currentTarget.value, scale: null })}>
                {names.map((n) => <option key={n} value={n}>{statisticWord(n)}</option>)}
              </select>
            </label>
            <div class="switch" role="group" aria-label="Scale">
              <button aria-pressed={!log} onClick={() => adjust({ scale: "linear" })}>linear</button>
              <button aria-pressed={log} onClick={() => adjust({ scale: "log" })}>log</button>
            </div>
            <a href={href("site", { run: run.id, site: site.name })}>open the site</a>
          </div>
          <Overlay runs={runs.filter((r) => chosen.includes(r.id))} all={runs} site={site.name} statistic={statistic} log={log} />
        </div>
      )}
    </section>
  );
}

interface SeriesFacts {
  statistics: string[];
}

function Overlay({ runs, all, site, statistic, log }: { runs: RunLine[]; all: RunLine[]; site: string; statistic: string; log: boolean }) {
  const dark = useDark();
  const key = JSON.stringify([runs.map((r) => [r.id, r.revision]), site, statistic]);
  const answer = useAnswer(key, (signal) =>
    Promise.all(runs.map((r) => askPacked<SeriesFacts>("series", { run: r.id, site, statistics: statistic, points: 2000 }, signal).catch(() => null))),
  );
  const drawn = useMemo(() => {
    const colours = lineColours(dark);
    const found = (answer.value ?? []).flatMap((packed, i) => {
      const r = runs[i];
      const steps = packed?.arrays["steps"];
      const values = packed?.arrays["s0"];
      return r && steps && values ? [{ run: r, steps, values }] : [];
    });
    const steps = [...new Set(found.flatMap((f) => Array.from(f.steps)))].sort((a, b) => a - b);
    const place = new Map(steps.map((s, i) => [s, i]));
    const lines = found.map(({ run, steps: own, values }): Line => {
      const spread = new Float64Array(steps.length).fill(NaN);
      own.forEach((s, i) => { spread[place.get(s) ?? 0] = values[i] ?? NaN; });
      return { label: run.name, colour: colours[all.findIndex((r) => r.id === run.id) % colours.length] ?? "", values: spread };
    });
    return { steps, lines };
  }, [answer.value, dark]);
  if (!drawn.lines.length) return <p class="quiet">{answer.busy ? "Reading …" : "None of the chosen runs has this site."}</p>;
  return <Chart steps={drawn.steps} lines={drawn.lines} log={log} height={300} />;
}

function Verdict({ runs, given, params }: { runs: RunLine[]; given: boolean; params: Record<string, string> }) {
  const dark = useDark();
  const a = Number(params["a"] ?? 0);
  const b = Number(params["b"] ?? 1);
  const result = useJson<Comparison>("comparison", given && params["a"] === undefined ? {} : { a, b });
  const rows = result.value?.rows ?? [];
  const drawn = useMemo(() => {
    const colours = lineColours(dark);
    const errors = rows.map((r) => number(r.error));
    const floors = rows.map((r) => number(r.floor));
    const lines: Line[] = [{ label: "error", colour: colours[0] ?? "", values: errors, width: 2 }];
    if (floors.some(Number.isFinite)) lines.push({ label: "noise floor", colour: colours[1] ?? "", values: floors, dash: [6, 4] });
    return { steps: rows.map((_, i) => i), lines };
  }, [result.value, dark]);
  const first = result.value?.first ?? null;
  const at = first ? rows.findIndex((r) => r.site === first.site) : -1;
  const over = rows.filter((r) => r.status !== "equal" && r.status !== "within");
  return (
    <div class="panel">
      <h2>Error along depth 
        {given
          ? <span class="quiet">{last(result.value?.target)} against {last(result.value?.reference)}</span>
          : <span class="tools inline">
              <select aria-label="Target" value={b} onChange={(e) => adjust({ a, b: e.currentTarget.value })}>{runs.map((r) => <option key={r.id} value={r.id}>{r.name}</option>)}</select>
              <span class="quiet">against</span>
              <select aria-label="Reference" value={a} onChange={(e) => adjust({ b, a: e.currentTarget.value })}>{runs.map((r) => <option key={r.id} value={r.id}>{r.name}</option>)}</select>
            </span>}
        <span class="quiet">{result.value?.floor_basis ? `noise floor: ${result.value.floor_basis}` : ""}</span></h2>
      {result.busy && !result.value && <p class="quiet">Comparing …</p>}
      {result.error && <p class="quiet">{result.error}</p>}
      {result.value && <p class="verdict">{result.value.verdict}</p>}
      {first && at >= 0 && <p><b>First divergence</b> <a href={href("site", { run: 0, site: first.site })}>{first.site}</a> <span class="quiet">error {show(number(first.error))}{first.floor ? `, noise floor ${show(number(first.floor))}` : ""}</span></p>}
      {rows.length > 0 && <Chart steps={drawn.steps} lines={drawn.lines} log height={260} xName="site" xLabel={(v) => shortSite(rows[Math.round(v)]?.site, v)} mark={at >= 0 ? { x: at, text: "first divergence" } : null} />}
      {over.length > 0 && (
        <div class="scroll"><table>
          <thead><tr><th>site</th><th>error</th><th>noise floor</th><th>status</th></tr></thead>
          <tbody>{over.slice(0, 200).map((r) => (
            <tr key={r.site}><td><a href={href("site", { run: 0, site: r.site })}>{r.site}</a></td><td>{show(number(r.error))}</td><td>{show(number(r.floor))}</td><td>{r.status}</td></tr>
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
