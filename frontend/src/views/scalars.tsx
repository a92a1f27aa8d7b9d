// All logged values of all chosen runs, over each other.

import { useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import { Chart } from "../chart";
import { strokeOf } from "../colour";
import { useAnswer } from "../data";
import { duration, grouped, show } from "../numbers";
import { gapsOn, overlay, sharedGaps, stretchesOf, usualRange, type Own } from "../overlay";
import { adjust, joinNames, splitNames, whole } from "../route";
import { useDark } from "../theme";
import type { RunLine } from "../types";
import { siteWord } from "../words";

type Axis = "step" | "epoch" | "time";
const MOST_RUNS = 40;

// The runs that a view lays over each other: those that were picked, else the one that is open.
export function chosenRuns(runs: RunLine[], params: Record<string, string>, run: RunLine | undefined): RunLine[] {
  const names = splitNames(params["with"]);
  const found = runs.filter((r) => names.includes(r.name));
  return found.length > 0 ? found.slice(0, MOST_RUNS) : run ? [run] : [];
}

export function RunChips({ runs, chosen }: { runs: RunLine[]; chosen: RunLine[] }) {
  const dark = useDark();
  const names = chosen.map((r) => r.name);
  const toggle = (name: string) => adjust({ with: joinNames(names.includes(name) ? names.filter((n) => n !== name) : [...names, name]) });
  const shown = runs.length <= 12 ? runs : chosen;
  return (
    <span class="chips" role="group" aria-label="Runs">
      {shown.map((r) => (
        <button key={r.name} class="chip" aria-pressed={names.includes(r.name)} onClick={() => toggle(r.name)}>
          <Swatch at={names.indexOf(r.name)} dark={dark} />{r.name}
        </button>
      ))}
      {shown.length < runs.length && <a class="chip" href={`#/runs?with=${encodeURIComponent(joinNames(names))}`}>choose runs</a>}
    </span>
  );
}

// A run's line in small: colour and dashes.
function Swatch({ at, dark }: { at: number; dark: boolean }) {
  const { colour, dash } = at < 0 ? { colour: "var(--line)", dash: undefined } : strokeOf(at, dark);
  return <svg class="swatch line" width="18" height="8" aria-hidden="true"><line x1="0" x2="18" y1="4" y2="4" style={{ stroke: colour, strokeWidth: 3, strokeDasharray: dash?.join(" ") ?? "none" }} /></svg>;
}

export function ScalarsView({ runs, run, params }: { runs: RunLine[]; run: RunLine | undefined; params: Record<string, string> }) {
  const chosen = chosenRuns(runs, params, run);
  const values = [...new Set(chosen.flatMap((r) => r.logged))];
  const only = params["value"];
  const shown = only && values.includes(only) ? [only] : values;
  const axis: Axis = params["x"] === "epoch" || params["x"] === "time" ? params["x"] : "step";
  const smooth = Math.min(999, Math.max(0, whole(params["smooth"]) ?? 0));
  const log = params["axis"] === "log";
  const outliers = params["outliers"] === "shown";
  const [from, to] = [whole(params["from"]), whole(params["to"])];
  const zoomed = axis === "step" && (from !== null || to !== null);
  return (
    <section class="scalars" aria-label="Scalars">
      <div class="tools">
        <RunChips runs={runs.filter((r) => !r.archived)} chosen={chosen} />
      </div>
      <div class="tools">
        <label>Over
          <select aria-label="Axis" value={axis} onChange={(e) => adjust({ x: e.currentTarget.value })}>
            <option value="step">steps</option><option value="epoch">epochs</option><option value="time">time</option>
          </select>
        </label>
        {live && (
          <label>smooth
            <input type="range" aria-label="Smoothing" min={0} max={990} step={10} value={smooth} onInput={(e) => adjust({ smooth: Number(e.currentTarget.value) || null })} />
            <output>{smooth / 1000}</output>
          </label>
        )}
        <div class="switch" role="group" aria-label="Scale">
          <button aria-pressed={!log} onClick={() => adjust({ axis: null })}>linear</button>
          <button aria-pressed={log} onClick={() => adjust({ axis: "log" })}>log</button>
        </div>
        <button class="chip" aria-pressed={!outliers} onClick={() => adjust({ outliers: outliers ? null : "shown" })} title="Fit the axis to the usual values">ignore outliers</button>
        {values.length > 1 && (
          <label>value
            <select aria-label="Value" value={only ?? ""} onChange={(e) => adjust({ value: e.currentTarget.value || null })}>
              <option value="">all {values.length}</option>
              {values.map((v) => <option key={v} value={v}>{siteWord(v)}</option>)}
            </select>
          </label>
        )}
        {zoomed && <button class="chip" onClick={() => adjust({ from: null, to: null })}>all steps</button>}
      </div>
      {values.length === 0 && <p class="quiet">{chosen.length === 0 ? "No run is chosen." : <>No values were logged. <code>watch.log("loss", loss)</code> logs one.</>}</p>}
      <div class={shown.length > 1 ? "grid2" : ""}>
        {shown.map((value) => <Overlaid key={value} runs={chosen} {...{ value, axis, smooth, log, outliers, from, to }} tall={shown.length === 1} />)}
      </div>
    </section>
  );
}

interface ScalarFacts { site: string; total: number; gaps: [number, number][] }
interface OverlaidProps { runs: RunLine[]; value: string; axis: Axis; smooth: number; log: boolean; outliers: boolean; from: number | null; to: number | null; tall: boolean }

function Overlaid({ runs, value, axis, smooth, log, outliers, from, to, tall }: OverlaidProps) {
  const dark = useDark();
  const asked = runs.flatMap((r, i) => (r.logged.includes(value) ? phasesOf(r).map((phase, p) => ({ run: r, phase, later: p, colour: i })) : []));
  const key = JSON.stringify([asked.map((a) => [a.run.name, a.run.revision, a.phase]), value, smooth]);
  const answer = useAnswer(key, (signal) => Promise.all(asked.map(async (a) => {
    const packed = await askPacked<ScalarFacts>("scalars", { run: a.run.name, site: value, phase: a.phase, smooth: smooth || null, points: 2000 }, signal).catch(() => null);
    return packed && { ...a, packed };
  })), value);
  const drawn = useMemo(() => {
    const found: Own[] = [];
    let broken = 0;
    for (const a of answer.value ?? []) {
      const arrays = a?.packed.arrays;
      if (!a || !arrays) continue;
      const at = axis === "step" ? arrays["steps"] : axis === "epoch" ? arrays["epochs"] : arrays["seconds"];
      const [raw, steps] = [arrays["value"], arrays["steps"]];
      if (!at || !steps || !raw || raw.length === 0) continue;
      const { colour, dash } = strokeOf(a.colour, dark, a.later);
      const label = a.run.name + (a.phase && a.phase !== "train" ? ` (${a.phase})` : "");
      broken += Array.from(raw).filter((v) => !Number.isFinite(v)).length;
      const smoothed = arrays["smooth"];
      const gaps = gapsOn(at, steps, a.packed.facts.gaps ?? []);
      if (smoothed) found.push({ line: { label: `${label}, as logged`, colour: `${colour}66`, width: 1, points: false, unnamed: true }, at, values: raw, gaps });
      found.push({ line: { label, colour, width: smoothed ? 2 : 1.5, ...(dash ? { dash } : {}) }, at, values: smoothed ?? raw, raw: smoothed ? raw : undefined, gaps });
    }
    const own = found.filter((f) => !f.line.unnamed);
    return { ...overlay(found), broken, usual: usualRange(own.map((f) => f.values), log), bad: stretchesOf(own, own.length > 1), gaps: sharedGaps(own) };
  }, [answer.value, axis, dark, log]);
  const label = axis === "time" ? duration : axis === "epoch" ? show : undefined;
  const cut = !outliers && drawn.usual;
  return (
    <div class="panel" data-testid="scalar" data-lines={drawn.lines.length}>
      <h2>{siteWord(value)}{cut && <span class="quiet">outliers lie beyond the axis</span>}{drawn.broken > 0 && <span class="bad">{grouped(drawn.broken)} not finite</span>}</h2>
      {drawn.lines.length > 0 && drawn.steps.length > 0
        ? <Chart
            name={siteWord(value)} steps={drawn.steps} lines={drawn.lines} log={log} height={tall ? 420 : 240} xName={axis} yRange={cut || null} yName={siteWord(value)} broken={drawn.bad} gaps={drawn.gaps}
            {...(label ? { xLabel: label } : {})} {...(axis === "step" ? { range: [from, to] as [number | null, number | null], select: (a: number | null, b: number | null) => adjust({ from: a, to: b }) } : {})} sync={`scalars-${axis}`}
          />
        : <p class="quiet">{answer.busy ? "Reading …" : axis === "epoch" ? "No epochs were recorded." : "Nothing was logged."}</p>}
    </div>
  );
}

// Training alone needs no word; where there is more, each phase is a line of its own.
const phasesOf = (run: RunLine): (string | null)[] => (run.phases.length > 1 ? run.phases : [null]);
