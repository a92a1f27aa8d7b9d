// One statistic of every site over a sweep: sites down, runs across in the order of a label; a row against that label.

import { useEffect, useMemo, useState } from "preact/hooks";
import { askPacked, live } from "../api";
import { sequential } from "../colour";
import { useAbout } from "../data";
import { Field } from "../field";
import { grouped, plural, show } from "../numbers";
import { paintSlice, type Slice } from "../picture";
import { adjust, whole } from "../route";
import { csv } from "../take/save";
import { Take } from "../take/menu";
import type { RunLine } from "../types";
import { siteWord, statisticWord } from "../words";
import { KindAndStatistic } from "../views/pickers";
import { kindsOf, statisticsOfKind, usualStatistic } from "../views/map";
import { labels } from "../views/ranksview";
import { columnAxis } from "./axis";
import { sorted, varied } from "./columns";
import { fact } from "./filter";
import { ColumnPicker, Scatter, keysOf, shownValue, valueAxis } from "./scatter";

interface Facts { sites: string[] }
interface Column { sites: Map<string, number>; values: ArrayLike<number>; steps: ArrayLike<number> }
const MOST = 80; // runs
const AT_ONCE = 6;

function useColumns(runs: RunLine[], statistic: string, kind: string, step: number | null): Map<string, Column | null> {
  const [found, setFound] = useState(new Map<string, Column | null>());
  const key = JSON.stringify([statistic, kind, step, runs.map((r) => [r.name, r.revision])]);
  useEffect(() => {
    const stop = new AbortController();
    const fresh = new Map<string, Column | null>();
    setFound(new Map());
    const waiting = [...runs];
    const ask = async (): Promise<void> => {
      for (let run = waiting.shift(); run && !stop.signal.aborted; run = waiting.shift()) {
        const packed = await askPacked<Facts>("column", { run: run.name, statistic, kind, step }, stop.signal).catch(() => null);
        const values = packed?.arrays["values"];
        const steps = packed?.arrays["steps"];
        fresh.set(run.name, packed && values && steps ? { sites: new Map(packed.facts.sites.map((s, i) => [s, i])), values, steps } : null);
        if (!stop.signal.aborted && (fresh.size % 8 === 0 || fresh.size === runs.length)) setFound(new Map(fresh));
      }
    };
    if (live && statistic) for (let i = 0; i < AT_ONCE; i++) void ask();
    return () => stop.abort();
  }, [key]);
  return found;
}

export function Layers({ runs: all, params }: { runs: RunLine[]; params: Record<string, string> }) {
  const keys = keysOf(all);
  const x = keys.includes(params["sx"] ?? "") ? params["sx"] ?? "" : varied(all)[0] ?? "steps";
  const runs = useMemo(() => sorted(all.filter((r) => r.steps > 0), x, false).slice(0, MOST), [all, x]);
  const about = useAbout(runs[0]).value;
  const kinds = about ? kindsOf(about).filter((k) => k !== "value") : [];
  const kind = params["kind"] === "all" ? "" : kinds.includes(params["kind"] ?? "") ? params["kind"] ?? "" : kinds[0] ?? "";
  const names = about ? statisticsOfKind(about, kind).filter((n) => n !== "nonfinite" && n !== "grad/weight") : [];
  const statistic = names.includes(params["statistic"] ?? "") ? params["statistic"] ?? "" : names.length ? usualStatistic(names) : "";
  const step = whole(params["step"]);
  const found = useColumns(runs, statistic, kind, step);
  const sites = useMemo(() => [...new Set([...found.values()].flatMap((c) => (c ? [...c.sites.keys()] : [])))], [found]);
  const value = (run: RunLine, site: string): number | null => {
    const column = found.get(run.name);
    const at = column?.sites.get(site);
    return !column || at === undefined || Number.isNaN(column.steps[at] ?? NaN) ? null : column.values[at] ?? NaN;
  };
  const picture = useMemo(() => {
    if (!sites.length) return "";
    const cells = sites.flatMap((site) => runs.map((run) => value(run, site)));
    const log = cells.every((v) => v === null || !Number.isFinite(v) || v > 0);
    const numbers = cells.map((v) => (v === null ? NaN : log ? Math.log(v) : v));
    const finite = numbers.filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const slice = { facts: { cellRows: sites.length, cellColumns: runs.length }, arrays: { low: Float64Array.from(numbers), there: Uint8Array.from(cells, (v) => Number(v !== null)) }, shapes: {} } as unknown as Slice;
    return paintSlice(slice, 0, { lut: sequential, low, high: high > low ? high : low + 1 }).toDataURL();
  }, [found, sites]);
  if (!live) return <p class="quiet">A report has no layers of a sweep; <code>torchtap view</code> shows them.</p>;
  const site = sites.includes(params["site"] ?? "") ? params["site"] ?? "" : sites[0] ?? "";
  const own = new Map(runs.map((r) => [r.name, value(r, site)]));
  const tall = Math.min(460, Math.max(60, sites.length * 15));
  return (
    <div class="sweep">
      <div class="tools">
        <KindAndStatistic kinds={kinds} kind={kind} names={names} statistic={statistic} />
        <label>at step <Field label="Step" value={step} placeholder="last" change={(text) => adjust({ step: whole(text) })} /></label>
        <ColumnPicker label="Across" name="sx" keys={keys} value={x} />
        {sites.length > 0 && <label>site
          <select aria-label="Site" value={site} onChange={(e) => adjust({ site: e.currentTarget.value })}>{sites.map((s) => <option key={s} value={s}>{siteWord(s)}</option>)}</select>
        </label>}
        <span class="quiet" role="status">{found.size < runs.length ? `reading, ${found.size} of ${plural(runs.length, "run")}` : all.length > MOST ? `the first ${MOST} of ${plural(all.length, "run")}` : ""}</span>
        <span class="space" />
        <Take name={`${statistic}-over-${x}`} csv={() => csv(["site", ...runs.map((r) => r.name)], sites.map((s) => [s, ...runs.map((r) => value(r, s))]))} />
      </div>
      {sites.length > 0 && (
        <div class="labelled">
          <div class="rows" aria-hidden="true">{labels(sites.length, Math.floor(tall / 14)).map((i) => <span key={i} style={{ top: `${((i + 0.5) / sites.length) * 100}%` }} title={sites[i]}>{siteWord(sites[i] ?? "")}</span>)}</div>
          <img
            class="rankmap" style={{ height: `${tall}px` }} src={picture} alt={`${statisticWord(statistic)} of ${plural(sites.length, "site")} in ${plural(runs.length, "run")}, ordered by ${x}`}
            onClick={(e) => { const box = e.currentTarget.getBoundingClientRect(); adjust({ site: sites[Math.min(sites.length - 1, Math.floor(((e.clientY - box.top) / box.height) * sites.length))] }); }}
          />
          <div class="columns" aria-hidden="true">{labels(runs.length, 10).map((i) => <span key={i} style={{ left: `${((i + 0.5) / runs.length) * 100}%` }}>{tick(runs[i], x)}</span>)}</div>
          <span class="axisname">runs by {x.replace(":", " ")}</span>
        </div>
      )}
      {site && <Scatter runs={runs} group={params["group"] ?? ""} xName={x.replace(":", " ")} yName={`${statistic} of ${siteWord(site)}${step === null ? ", last step" : `, step ${grouped(step)}`}`} x={columnAxis(runs, x)} y={valueAxis(runs, own)} told={(run) => `${run.name}: ${shownValue(own.get(run.name))}`} value={(run) => own.get(run.name)} />}
      {!site && found.size === runs.length && <p class="quiet">No site of these runs has this statistic.</p>}
    </div>
  );
}

const tick = (run: RunLine | undefined, key: string): string => {
  const value = run ? fact(run, key) : null;
  return typeof value === "number" ? show(value) : String(value ?? "–");
};
