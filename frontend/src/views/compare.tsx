// The same site of several runs over each other; and, where two runs were compared, the error along depth.

import { useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { Chart } from "../chart";
import { strokeOf } from "../colour";
import { statisticsOf, useAnswer } from "../data";
import { overlay, sharedGaps, stretchesOf } from "../overlay";
import { adjust, href, whole } from "../route";
import { usualScale } from "../scale";
import { useDark } from "../theme";
import type { RunLine } from "../types";
import { siteWord, statisticWord } from "../words";
import { usualStatistic } from "./map";
import { chosenRuns, RunChips } from "./scalars";
import { Verdict } from "./verdict";

export function CompareView({ run, runs, about, params, given }: ViewProps & { given: boolean }) {
  const picked = chosenRuns(runs, params, undefined);
  const chosen = picked.length > 0 ? picked : runs.slice(0, 8);
  const measured = useMemo(() => about.sites.filter((s) => (about.statistics[s.statistics] ?? []).length > 0), [about]);
  const site = measured.find((s) => s.name === params["site"]) ?? measured[0];
  const names = site ? statisticsOf(about, site.name) : [];
  const statistic = names.includes(params["statistic"] ?? "") ? params["statistic"] ?? "" : usualStatistic(names);
  const log = (params["axis"] ?? usualScale(statistic)) === "log";
  if (runs.length < 2 && !given) {
    return (
      <section class="compare" aria-label="Compare"><p class="quiet">
        One run is open. <code>torchtap view runs/a runs/b</code> or <code>torchtap view runs</code> lays several over each other.
      </p></section>
    );
  }
  return (
    <section class="compare" aria-label="Compare">
      {(given || runs.length > 1) && <Verdict runs={runs} given={given} params={params} run={run} />}
      {runs.length > 1 && site && (
        <div class="panel">
          <h2>Same site, several runs <RunChips runs={runs.filter((r) => !r.archived)} chosen={chosen} /></h2>
          <div class="tools">
            <label>Site
              <select aria-label="Site" value={site.name} onChange={(e) => adjust({ site: e.currentTarget.value })}>
                {measured.map((s) => <option key={s.name} value={s.name}>{siteWord(s.name)}</option>)}
              </select>
            </label>
            <label>by
              <select aria-label="Statistic" value={statistic} onChange={(e) => adjust({ statistic: e.currentTarget.value, axis: null })}>
                {names.map((n) => <option key={n} value={n}>{statisticWord(n)}</option>)}
              </select>
            </label>
            <div class="switch" role="group" aria-label="Scale">
              <button aria-pressed={!log} onClick={() => adjust({ axis: "linear" })}>linear</button>
              <button aria-pressed={log} onClick={() => adjust({ axis: "log" })}>log</button>
            </div>
            <a href={href("site", { ...params, site: site.name })}>open the site</a>
            {live && <a href={href("map", { ...params, against: chosen.find((r) => r.name !== run.name)?.name })}>difference on the map</a>}
          </div>
          <Overlay runs={chosen} site={site.name} statistic={statistic} log={log} phase={params["phase"]} from={whole(params["from"])} to={whole(params["to"])} />
        </div>
      )}
    </section>
  );
}

interface SeriesFacts { statistics: string[]; gaps?: [number, number][] }

function Overlay({ runs, site, statistic, log, phase, from, to }: { runs: RunLine[]; site: string; statistic: string; log: boolean; phase: string | undefined; from: number | null; to: number | null }) {
  const dark = useDark();
  const key = JSON.stringify([runs.map((r) => [r.name, r.revision]), phase, site, statistic]);
  const answer = useAnswer(key, (signal) =>
    Promise.all(runs.map(async (r) => {
      const packed = r.known && r.steps === 0 ? null : await askPacked<SeriesFacts>("series", { run: r.name, phase, site, statistics: statistic, points: 2000 }, signal).catch(() => null);
      return { run: r, packed };
    })), `${site} ${statistic}`);
  const drawn = useMemo(() => {
    const missing: string[] = [];
    const found = (answer.value ?? []).flatMap(({ run, packed }, i) => {
      const steps = packed?.arrays["steps"];
      const at = packed?.facts.statistics.indexOf(statistic) ?? -1; // a report holds all statistics of a site at once
      const values = at >= 0 ? packed?.arrays[`s${at}`] : undefined;
      if (!steps || !values) missing.push(run.name);
      return steps && values ? [{ line: { label: run.name, ...strokeOf(i, dark) }, at: steps, values, gaps: packed?.facts.gaps ?? [] }] : [];
    });
    return { ...overlay(found), missing, bad: stretchesOf(found, true), gaps: sharedGaps(found) };
  }, [answer.value, dark]);
  if (answer.busy && !answer.value) return <p class="quiet">Reading …</p>;
  return (
    <>
      {drawn.missing.length > 0 && <p class="quiet">{live ? "Not recorded" : "Not recorded, or not part of the report"}: {drawn.missing.join(", ")}</p>}
      {drawn.lines.length > 0 && <Chart name={`${site}-${statistic}`} steps={drawn.steps} lines={drawn.lines} log={log} height={300} yName={statisticWord(statistic)} broken={drawn.bad} gaps={drawn.gaps} range={[from, to]} select={(a, b) => adjust({ from: a, to: b })} />}
    </>
  );
}
