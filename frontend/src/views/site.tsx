// One site: what it is, its series, its histograms over time, its recorded tensors.

import { useEffect, useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { Chart, type Line } from "../chart";
import { lines as lineColours } from "../colour";
import { statisticsOf, useAnswer } from "../data";
import { plural } from "../numbers";
import { adjust, go, href, whole } from "../route";
import { usualScale } from "../scale";
import { useDark } from "../theme";
import { HealthMark } from "../tree";
import { findingWord, kindWord, siteWord, statisticWord } from "../words";
import { Histograms } from "./histograms";
import { RanksPanel } from "./ranks";
import { TensorPanel } from "./tensor";

interface SeriesFacts {
  gaps?: [number, number][];
  statistics: string[];
  total: number;
}

const ALWAYS = ["mean", "std", "min", "max"];
const COUNTS = ["nans", "infs"];

export function SiteView({ run, runs, about, findings, params }: ViewProps) {
  const dark = useDark();
  const phase = params["phase"];
  const name = params["site"] ?? about.sites[0]?.name ?? "";
  const position = about.sites.findIndex((s) => s.name === name);
  const site = about.sites[position];
  const available = statisticsOf(about, name);
  const more = available.filter((s) => !ALWAYS.includes(s) && s !== "count");
  const first = ["rms", "l2", "absmax"].find((s) => more.includes(s)) ?? more[0];
  const second = (params["series"]?.split(",") ?? (first ? [first] : [])).filter((s) => more.includes(s));
  const [from, to] = [whole(params["from"]), whole(params["to"])];
  const asked = [...new Set([...[...ALWAYS, ...COUNTS].filter((s) => available.includes(s)), ...second])];
  const series = useAnswer(
    asked.length && site ? JSON.stringify([run.name, run.revision, phase, name, asked, from, to]) : null,
    (signal) => askPacked<SeriesFacts>("series", { run: run.name, phase, site: name, statistics: asked.join(","), from, to, points: 6000 }, signal),
    `${run.name} ${name} ${phase}`,
  );

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea, canvas, dialog, details")) return;
      const turn = event.key === "ArrowDown" || event.key === "j" ? 1 : event.key === "ArrowUp" || event.key === "k" ? -1 : 0;
      const next = about.sites[position + turn];
      if (turn && next) {
        event.preventDefault();
        go("site", { ...params, site: next.name });
      }
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  const drawn = useMemo(() => {
    const packed = series.value;
    const steps = packed?.arrays["steps"];
    if (!packed || !steps) return null;
    const colours = lineColours(dark);
    const take = (statistic: string) => packed.arrays[`s${packed.facts.statistics.indexOf(statistic)}`];
    const main: Line[] = [];
    const add = (into: Line[], statistic: string, colour: string, extra: Partial<Line> = {}) => {
      const values = take(statistic);
      if (values) into.push({ label: statistic, colour, values, there: packed.arrays[`t${packed.facts.statistics.indexOf(statistic)}`], ...extra });
    };
    add(main, "max", colours[1] ?? "", { width: 1 });
    add(main, "min", colours[1] ?? "", { width: 1 });
    const band: [number, number] | undefined = main.length === 2 ? [0, 1] : undefined;
    add(main, "mean", colours[0] ?? "", { width: 2 });
    add(main, "std", colours[3] ?? "", { dash: [6, 3] });
    const rest: Line[] = [];
    second.forEach((s, i) => add(rest, s, colours[i % colours.length] ?? ""));
    const counts = COUNTS.map(take);
    const logged = take("value"); // a logged value has no counts: it is broken where it is not finite itself
    if (logged) counts.push(Float64Array.from(logged, (v) => (Number.isFinite(v) ? 0 : 1)));
    return { steps, main, band, rest, broken: stretches(steps, counts), gaps: packed.facts.gaps ?? [] };
  }, [series.value, dark, second.join()]);

  if (!site) {
    return <section class="site"><p class="quiet">{name ? <>This run has no site called <code>{name}</code>.</> : "Choose a site in the tree on the left."}</p></section>;
  }
  const markOf = (n: string) => (Object.hasOwn(findings.marks, n) ? findings.marks[n] : undefined);
  const its = findings.findings.filter((f) => f.sites.includes(name));
  const origin = findings.findings.find((f) => f.kind === "nonfinite");
  const holds = about.tensors[name] ?? [];
  const restLog = (params["axis"] ?? usualScale(second[0] ?? "")) === "log";
  const step = whole(params["step"]);
  const look = { range: [from, to] as [number | null, number | null], select: (a: number | null, b: number | null) => adjust({ from: a, to: b }) };
  return (
    <section class="site" aria-label="Site">
      <div class="head">
        <h1><HealthMark mark={markOf(name)} />{siteWord(name)}</h1>
        <p class="facts">
          <span>{kindWord(site.kind)}</span>
          {site.class && <span>{site.class}</span>}
          {site.shape && <span class="mono">[{site.shape.join(" × ")}]</span>}
          {site.dtype && <span class="mono">{site.dtype}</span>}
          {site.source && <span class="mono" title={site.source}>{site.source.split(/[\\/]/).slice(-2).join("/")}</span>}
          <span>{position + 1} of {about.sites.length} in execution order</span>
          <a href={href("map", { ...params, kind: site.kind, under: null, top: null, bottom: null })}>on the map</a>
          {(from !== null || to !== null) && <button class="chip" onClick={() => adjust({ from: null, to: null })}>all steps</button>}
        </p>
      </div>
      {its.map((f) => <p key={f.kind + f.site} class={`finding ${f.severity}`}><b>{findingWord(f.kind)}</b> {f.message}</p>)}
      {its.length === 0 && markOf(name) === "spread" && origin && (
        <p class="finding error"><b>NaN or infinity</b> from another place: the first was at <a href={href("site", { ...params, site: origin.site, step: origin.step })}>{origin.site}</a>, step {origin.step}</p>
      )}
      {series.error && <p class="alarm">{series.error}</p>}
      {drawn && drawn.main.length > 0 && (
        <div class="panel">
          <h2>Values over time <span class="quiet">mean and standard deviation; the band is minimum to maximum</span></h2>
          <Chart name={`${name}-values`} {...look} steps={drawn.steps} lines={drawn.main} {...(drawn.band ? { band: drawn.band } : {})} mark={step === null ? null : { x: step, text: `step ${step.toLocaleString("en-US")}` }} broken={drawn.broken} gaps={drawn.gaps} yName="value" sync="site" />
        </div>
      )}
      {more.length > 0 && (
        <div class="panel">
          <h2>{site.kind === "value" ? "Value over time" : "More statistics"}
            <span class="chips" role="group" aria-label="Statistics">
              {more.length > 1 && more.map((s) => (
                <button key={s} class="chip" aria-pressed={second.includes(s)} title={statisticWord(s)}
                  onClick={() => adjust({ series: (second.includes(s) ? second.filter((x) => x !== s) : [...second, s]).join(",") || null })}>{s}</button>
              ))}
            </span>
            <span class="switch" role="group" aria-label="Scale">
              <button aria-pressed={!restLog} onClick={() => adjust({ axis: "linear" })}>linear</button>
              <button aria-pressed={restLog} onClick={() => adjust({ axis: "log" })}>log</button>
            </span>
          </h2>
          {drawn && drawn.rest.length > 0 && <Chart name={`${name}-statistics`} {...look} steps={drawn.steps} lines={drawn.rest} log={restLog} height={200} broken={drawn.broken} gaps={drawn.gaps} yName={second.length === 1 ? statisticWord(second[0] ?? "") : "statistic"} sync="site" />}
        </div>
      )}
      {series.value && series.value.facts.total > (drawn?.steps.length ?? 0) && (
        <p class="note">{plural(series.value.facts.total, "step")}, of which those are drawn that hold every minimum and maximum.</p>
      )}
      {run.ranks > 1 && live && <RanksPanel run={run} site={name} statistic={second[0] ?? available[0] ?? "mean"} />}
      {holds.includes("histogram") && <Histograms run={run} site={name} params={params} />}
      {holds.includes("tensor") && <TensorPanel key={name} run={run} runs={runs} site={name} params={params} />}
      {available.length === 0 && holds.length === 0 && <p class="quiet">Nothing was recorded here yet.</p>}
    </section>
  );
}

// From the first to the last step of each row of steps at which any count is above zero.
function stretches(steps: ArrayLike<number>, counts: (ArrayLike<number> | undefined)[]): [number, number][] {
  const found: [number, number][] = [];
  let from: number | null = null;
  for (let i = 0; i <= steps.length; i++) {
    const broken = i < steps.length && counts.some((c) => (c?.[i] ?? 0) > 0);
    if (broken && from === null) from = steps[i] ?? 0;
    if (!broken && from !== null) {
      found.push([from, steps[i - 1] ?? from]);
      from = null;
    }
  }
  return found.slice(0, 200);
}
