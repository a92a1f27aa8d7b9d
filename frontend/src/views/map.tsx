// Depth × time: sites in execution order against steps, coloured by one statistic.

import { useEffect, useMemo } from "preact/hooks";
import { askPacked } from "../api";
import type { ViewProps } from "../app";
import { useAnswer } from "../data";
import { Grid, type MapFacts, type Part } from "../heat/grid";
import { HeatMap, type Flag } from "../heat/heatmap";
import { Legend } from "../heat/legend";
import { grouped } from "../numbers";
import { adjust, go } from "../route";
import { makeScale, usualScale } from "../scale";
import { useDark } from "../theme";
import type { About } from "../types";
import { FINDING_WORDS, kindWord, statisticWord } from "../words";

const KIND_ORDER = ["output", "grad_output", "param_grad", "param", "input", "grad_input", "attention", "value", "buffer"];
const whole = (text: string | undefined): number | null => (text === undefined || text === "" || !Number.isFinite(Number(text)) ? null : Number(text));

export function kindsOf(about: About): string[] {
  const there = new Set(about.sites.filter((s) => (about.statistics[s.statistics] ?? []).length > 0).map((s) => s.kind));
  return [...KIND_ORDER.filter((k) => there.has(k)), ...[...there].filter((k) => !KIND_ORDER.includes(k)).sort()];
}

export function statisticsOfKind(about: About, kind: string): string[] {
  const found = new Set<string>();
  for (const site of about.sites) {
    if (!kind || site.kind === kind) for (const name of about.statistics[site.statistics] ?? []) found.add(name);
  }
  return [...found];
}

export function usualStatistic(names: string[]): string {
  return ["rms", "std", "l2", "absmax", "mean"].find((name) => names.includes(name)) ?? names[0] ?? "std";
}

// What a row is called: the kind is left out where all rows are of one kind.
export function rowName(name: string, kind: string): string {
  if (!kind) return name;
  const cut = name.lastIndexOf(":");
  const leaf = name.slice(cut + 1 + kind.length).replace(/^\./, " ");
  return (name.slice(0, cut) || "(model)") + (leaf ? ` ${leaf.trim()}` : "");
}

export function MapView({ run, about, findings, params }: ViewProps) {
  const dark = useDark();
  const kinds = kindsOf(about);
  const kind = params["kind"] === "all" ? "" : params["kind"] ?? kinds[0] ?? "";
  const names = statisticsOfKind(about, kind);
  const statistic = params["statistic"] && names.includes(params["statistic"]) ? params["statistic"] : usualStatistic(names);
  const log = (params["scale"] ?? usualScale(statistic)) === "log";
  const under = params["under"] ?? "";
  const part: Part = { from: whole(params["from"]), to: whole(params["to"]), top: whole(params["top"]), bottom: whole(params["bottom"]) };
  const asked = {
    run: run.id, statistic, kind, under, ...part,
    rows: Math.min(900, Math.max(200, window.innerHeight - 190)),
    columns: Math.min(2400, Math.max(300, window.innerWidth - 480)),
  };
  const key = JSON.stringify([asked, run.revision]);
  const ask = (name: string) => async (signal: AbortSignal) => new Grid(await askPacked<MapFacts>("map", { ...asked, statistic: name }, signal));
  const answer = useAnswer(names.length ? key : null, ask(statistic));
  const anyBad = Object.values(findings.marks).some((mark) => mark !== "warning");
  const badAnswer = useAnswer(anyBad && names.includes("nans") ? key : null, ask("nonfinite"));
  const grid = answer.value;
  const scale = useMemo(() => grid && makeScale(grid.facts.range, log, dark), [grid, log, dark]);

  // The rows of the whole map, to place findings; rows of the grid are told by the server.
  const order = useMemo(() => {
    const rows = about.sites.filter(
      (s) => (!kind || s.kind === kind) && (about.statistics[s.statistics] ?? []).includes(statistic) && (!under || s.module === under || s.module.startsWith(`${under}.`)),
    );
    return new Map(rows.map((s, row) => [s.name, row]));
  }, [about, kind, statistic, under]);
  const flags = useMemo(() => findings.findings.flatMap((f): Flag[] => {
    const row = order.get(f.site);
    if (row === undefined || f.step === null) return [];
    return [{ row, step: f.step, text: f.kind === "nonfinite" ? "first NaN or inf" : (FINDING_WORDS[f.kind] ?? f.kind).toLowerCase(), grave: f.severity === "error" }];
  }), [findings, order]);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea")) return;
      const turn = event.key === "]" ? 1 : event.key === "[" ? -1 : 0;
      if (turn) adjust({ statistic: names[(names.indexOf(statistic) + turn + names.length) % names.length], scale: null });
      if (event.key === "l") adjust({ scale: log ? "linear" : "log" });
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  const zoomed = part.from !== null || part.to !== null || part.top !== null || part.bottom !== null;
  const siteAt = (index: number | undefined) => (index === undefined ? undefined : about.sites[index]?.name);
  return (
    <section class="map" aria-label="Map">
      <div class="tools">
        <label>Show
          <select value={kind || "all"} aria-label="Kind" onChange={(e) => adjust({ kind: e.currentTarget.value, statistic: null, scale: null, top: null, bottom: null })}>
            {kinds.map((k) => <option key={k} value={k}>{kindWord(k)}</option>)}
            {kinds.length > 1 && <option value="all">Everything</option>}
          </select>
        </label>
        <label>by
          <select value={statistic} aria-label="Statistic" onChange={(e) => adjust({ statistic: e.currentTarget.value, scale: null })}>
            {names.map((n) => <option key={n} value={n}>{statisticWord(n)}</option>)}
          </select>
        </label>
        <div class="switch" role="group" aria-label="Colour scale">
          <button aria-pressed={!log} onClick={() => adjust({ scale: "linear" })}>linear</button>
          <button aria-pressed={log} onClick={() => adjust({ scale: "log" })}>log</button>
        </div>
        {under && <button class="chip" onClick={() => adjust({ under: null, top: null, bottom: null })} title="Show the whole model">{under} ×</button>}
        {zoomed && <button class="chip" onClick={() => adjust({ from: null, to: null, top: null, bottom: null })} title="Whole map (Esc)">whole map</button>}
        <span class="space" />
        {scale && <Legend scale={scale} marked={anyBad} />}
      </div>
      {answer.error && <p class="alarm" role="alert">{answer.error}</p>}
      {!names.length && <p class="quiet">This run holds no statistics yet.</p>}
      {grid?.empty && <p class="quiet">Nothing was recorded here yet.</p>}
      {grid && scale && !grid.empty && (
        <HeatMap
          grid={grid} bad={badAnswer.value} scale={scale} part={part} flags={flags} statistic={statistic} dark={dark}
          names={(row) => rowName(siteAt(grid.sitesOf(row)[0]) ?? "", kind)}
          sites={(row) => Array.from(grid.sitesOf(row), (index) => siteAt(index) ?? "")}
          zoom={(next) => adjust({ from: next.from, to: next.to, top: next.top, bottom: next.bottom })}
          open={(site, step) => go("site", { run: run.id, site, step })}
        />
      )}
      {grid && grid.facts.shownSteps > grid.columns && (
        <p class="note">{grouped(grid.facts.shownSteps)} steps in {grouped(grid.columns)} columns: each shows the value furthest from the usual, so no spike is hidden. Drag to look closer.</p>
      )}
    </section>
  );
}
