// Depth × time: sites in execution order against steps, coloured by one statistic.

import { useEffect, useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { useAnswer } from "../data";
import { colouringOf, scalesOf } from "../heat/colouring";
import { foldings, foldOf } from "../heat/fold";
import { Grid, within, type MapFacts, type Part } from "../heat/grid";
import { HeatMap } from "../heat/heatmap";
import { Legend } from "../heat/legend";
import { LossColumns } from "../heat/loss";
import type { Flag } from "../heat/marks";
import { grouped, plural } from "../numbers";
import { adjust, go, joinNames, whole } from "../route";
import { groupsOf } from "../runs/columns";
import { filterOf } from "../runs/filter";
import { usualScale } from "../scale";
import { useDark } from "../theme";
import type { About, RunLine } from "../types";
import { findingWord, siteWord } from "../words";
import { MapTools } from "./maptools";

const KIND_ORDER = ["output", "grad_output", "param_grad", "param", "input", "grad_input", "attention", "value", "buffer"];

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
function rowName(name: string, kind: string): string {
  if (!kind || kind === "value") return siteWord(name);
  const cut = name.lastIndexOf(":");
  const leaf = name.slice(cut + 1 + kind.length).replace(/^\./, " ");
  return (name.slice(0, cut) || "(model)") + (leaf ? ` ${leaf.trim()}` : "");
}

// The logged value in the strip: the one that was chosen, else the loss.
export function lossOf(about: About, chosen: string | undefined): string | null {
  const logged = about.sites.filter((s) => s.kind === "value" && s.module === "").map((s) => s.name);
  if (chosen === "none") return null;
  if (chosen && logged.includes(chosen)) return chosen;
  return logged.find((n) => n === ":value.loss") ?? logged.find((n) => /loss/i.test(n)) ?? logged[0] ?? null;
}

interface SeriesFacts { statistics: string[] }

// Two groups of runs by the value of a label, as the table of runs groups them.
function groupDifference(runs: RunLine[], params: Record<string, string>): { of: string[]; minus: string[]; from: string; to: string } | null {
  const { group, of, minus } = params;
  if (!group || of === undefined || minus === undefined) return null;
  const test = filterOf(params["filter"] ?? "");
  const found = new Map(groupsOf(runs.filter((r) => !r.archived && test(r)), group));
  const names = (value: string) => (found.get(value) ?? []).map((r) => r.name);
  return names(of).length && names(minus).length ? { of: names(of), minus: names(minus), from: `${group} ${of}`, to: `${group} ${minus}` } : null;
}

export function MapView({ run, runs, about, findings, params }: ViewProps) {
  const dark = useDark();
  const phase = params["phase"];
  const kinds = kindsOf(about);
  const kind = params["kind"] === "all" ? "" : kinds.includes(params["kind"] ?? "") ? params["kind"] ?? "" : kinds[0] ?? "";
  const names = statisticsOfKind(about, kind);
  const statistic = params["statistic"] && names.includes(params["statistic"]) ? params["statistic"] : usualStatistic(names);
  const under = params["under"] ?? "";
  const against = runs.find((r) => r.name === params["against"] && r.name !== run.name)?.name ?? null;
  const relative = params["change"] !== "difference";
  const groups = useMemo(() => groupDifference(runs, params), [runs, params["group"], params["of"], params["minus"], params["filter"]]);
  const differs = against !== null || groups !== null;
  const log = (params["scale"] ?? (differs && relative ? "log" : usualScale(statistic))) === "log";
  const part: Part = { from: whole(params["from"]), to: whole(params["to"]), top: whole(params["top"]), bottom: whole(params["bottom"]) };
  const counts = useMemo(() => foldings(about, kind, under), [about, kind, under]);
  const fold = live ? foldOf(params["fold"], counts, counts[counts.length - 1] ?? 0) : null; // a report holds rows as they are
  const asked = {
    run: run.name, phase, statistic, kind, under, ...part, fold, leaves: live && params["leaves"] !== "all" ? "folded" : null, against, of: groups && joinNames(groups.of), minus: groups && joinNames(groups.minus), change: differs && relative ? "relative" : null,
    rows: Math.min(900, Math.max(200, window.innerHeight - 190)),
    columns: Math.min(2400, Math.max(300, window.innerWidth - 480)),
  };
  const key = JSON.stringify([asked, run.revision]);
  const ask = (name: string) => async (signal: AbortSignal) => {
    const packed = await askPacked<MapFacts>("map", { ...asked, under: live ? under : null, statistic: name }, signal);
    return new Grid(live || !under ? packed : within(packed, under));
  };
  const answer = useAnswer(names.length ? key : null, ask(statistic), `${run.name} ${phase}`);
  const anyBad = kind === "value" || Object.values(findings.marks).some((mark) => mark !== "warning");
  const counted = names.includes("nans") || (kind === "value" && statisticsOfKind(about, "").includes("nans"));
  const badAnswer = useAnswer(anyBad && counted ? key : null, ask("nonfinite"), `${run.name} ${phase}`);
  const loss = lossOf(about, params["strip"]);
  const lossAnswer = useAnswer(
    loss === null ? null : JSON.stringify([run.name, run.revision, phase, loss, part.from, part.to]),
    (signal) => askPacked<SeriesFacts>("series", { run: run.name, phase, site: loss, statistics: "value", from: part.from, to: part.to, points: 4000 }, signal),
    `${run.name} ${loss} ${phase}`,
  );
  const grid = answer.value;
  const scaleOf = useMemo(() => grid && scalesOf(grid, params["colours"], log, dark), [grid, params["colours"], log, dark]);
  const lossColumns = useMemo(() => {
    const packed = lossAnswer.value;
    const values = packed?.arrays[`s${packed.facts.statistics.indexOf("value")}`];
    return grid && !grid.empty && loss !== null && packed?.arrays["steps"] && values ? new LossColumns(loss, grid, packed.arrays["steps"], values) : null;
  }, [grid, lossAnswer.value, loss]);
  const flags = useMemo(() => (grid && !differs ? findings.findings : []).flatMap((f): Flag[] => {
    const row = grid?.placeOf(f.site) ?? null;
    if (row === null || f.step === null) return [];
    return [{ row, step: f.step, text: f.kind === "nonfinite" ? "first NaN or inf" : findingWord(f.kind).toLowerCase(), grave: f.severity === "error" }];
  }), [findings, grid, differs]);
  const nameOf = useMemo(() => (row: number) => {
    const module = grid?.moduleOf(row) ?? null;
    return module === null ? rowName(grid?.sitesOf(row)[0] ?? "", kind) : module || "(model)";
  }, [grid, kind]);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea, dialog")) return;
      const turn = event.key === "]" ? 1 : event.key === "[" ? -1 : 0;
      if (turn) adjust({ statistic: names[(names.indexOf(statistic) + turn + names.length) % names.length], scale: null });
      if (event.key === "l") adjust({ scale: log ? "linear" : "log" });
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  const open = (site: string, module: string | null, step: number) =>
    module !== null && fold === null ? go("map", { ...params, leaves: "all", under: module.slice(0, module.lastIndexOf(":")) || null, top: null, bottom: null }) : module !== null && module !== under ? go("map", { ...params, under: module, fold: null, top: null, bottom: null }) : go("site", { ...params, site, step });
  return (
    <section class="map" aria-label="Map">
      <MapTools {...{ about, run, runs, params, kinds, kind, names, statistic, log, under, part, counts, fold, against, relative, loss }}>
        {grid && scaleOf && <Legend scale={scaleOf(0)} marked={anyBad} each={colouringOf(params["colours"]).mode === "row"} />}
      </MapTools>
      {groups && (
        <p class="note" data-testid="groups">The mean of {plural(groups.of.length, "run")} with {groups.from} minus that of {plural(groups.minus.length, "run")} with {groups.to}
          <span class="switch" role="group" aria-label="Difference"><button aria-pressed={relative} onClick={() => adjust({ change: null, scale: null })}>relative</button><button aria-pressed={!relative} onClick={() => adjust({ change: "difference", scale: null })}>absolute</button></span>
          <button class="chip" onClick={() => adjust({ of: null, minus: null })}>{run.name} alone</button></p>
      )}
      {answer.error && <p class="alarm" role="alert">{answer.error}</p>}
      {!names.length && <p class="quiet">This run holds no statistics yet.</p>}
      {grid?.empty && <p class="quiet">{part.from !== null || part.to !== null ? "Nothing was recorded in this range of steps." : "Nothing was recorded here yet."}</p>}
      {grid && scaleOf && !grid.empty && (
        <HeatMap
          {...{ grid, scaleOf, part, flags, dark, nameOf, open }} bad={badAnswer.value} loss={lossColumns}
          statistic={differs ? `${statistic}, ${relative ? "relative " : ""}difference to ${against ?? groups?.to},` : statistic}
          zoom={(next) => adjust({ from: next.from, to: next.to, top: next.top, bottom: next.bottom })}
        />
      )}
      {grid && grid.facts.shownSteps > grid.columns && (
        <p class="note">{grouped(grid.facts.shownSteps)} steps in {grouped(grid.columns)} columns: each shows the value furthest from the usual, so no spike is hidden. Drag to look closer.</p>
      )}
    </section>
  );
}
