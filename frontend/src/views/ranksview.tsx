// Every site by ranks at one step: which rank is unlike the others, and where it must not be.

import { useMemo, useState } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { diverging } from "../colour";
import { useAnswer } from "../data";
import { Field } from "../field";
import { grouped, plural, show } from "../numbers";
import { paintSlice, type Slice } from "../picture";
import { adjust, href, whole } from "../route";
import { Take } from "../take/menu";
import { csv } from "../take/save";
import { useDark } from "../theme";
import { kindWord, siteWord } from "../words";
import { kindsOf, statisticsOfKind, usualStatistic } from "./map";
import { KindAndStatistic } from "./pickers";

interface Facts { step: number; ranks: number[]; absent: number[]; statuses: string[]; sites: string[]; shares: string[] }
interface Row { site: string; share: string; values: number[]; middle: number; away: number[]; most: number; worst: number; apart: boolean; bad: number[]; lacking: number[] }
const SHOWN = 200;
const NAMED = 8; // ranks that are named one by one

// How far each rank is from the middle one, by size; ranks that hold the same must not differ at all, nor be NaN alone.
function rowsOf(facts: Facts, values: ArrayLike<number>, there: ArrayLike<number> | undefined): Row[] {
  const width = facts.ranks.length;
  const ranksWhere = (test: (k: number) => boolean) => facts.ranks.filter((_, k) => test(k));
  return facts.sites.map((site, i) => {
    const own = Array.from({ length: width }, (_, k) => values[i * width + k] ?? NaN);
    const has = (k: number) => (there ? there[i * width + k] === 1 : !Number.isNaN(own[k] ?? NaN));
    const sorted = own.filter(Number.isFinite).sort((a, b) => a - b);
    const middle = sorted[(sorted.length - 1) >> 1] ?? NaN;
    const away = own.map((v) => (v === middle ? 0 : middle === 0 ? (Number.isNaN(v) ? NaN : Math.sign(v) * Infinity) : (v - middle) / Math.abs(middle)));
    const bad = ranksWhere((k) => has(k) && !Number.isFinite(own[k]));
    const size = away.map((v, k) => (!has(k) ? -1 : Number.isFinite(v) ? Math.abs(v) : sorted.length ? Infinity : 0));
    const worst = size.reduce((best, v, k) => (v > (size[best] ?? -1) ? k : best), 0);
    const share = facts.shares[i] ?? "";
    const most = Math.max(...size);
    return { site, share, values: own, middle, away, most, worst, apart: share === "same" && most > 0, bad, lacking: ranksWhere((k) => !has(k)) };
  });
}

const ranksText = (ranks: number[]): string => (ranks.length > NAMED ? plural(ranks.length, "rank") : `rank ${ranks.join(", ")}`);

function byStatus(facts: Facts): [string, number[]][] {
  const found = new Map<string, number[]>();
  facts.ranks.forEach((rank, i) => found.set(facts.statuses[i] ?? "", [...(found.get(facts.statuses[i] ?? "") ?? []), rank]));
  return [...found].sort((a, b) => a[1].length - b[1].length);
}

export function RanksView({ run, about, findings, params }: ViewProps) {
  const dark = useDark();
  const kinds = kindsOf(about);
  const kind = params["kind"] === "all" ? "" : kinds.includes(params["kind"] ?? "") ? params["kind"] ?? "" : kinds[0] ?? "";
  const names = statisticsOfKind(about, kind);
  const statistic = names.includes(params["statistic"] ?? "") ? params["statistic"] ?? "" : usualStatistic(names);
  const step = whole(params["step"]);
  const [pointed, setPointed] = useState<[number, number] | null>(null);
  const asked = { run: run.name, phase: params["phase"], statistic, kind, step };
  const ask = live && run.ranks > 1 && names.length > 0;
  const answer = useAnswer(ask ? JSON.stringify([asked, run.revision]) : null, (signal) => askPacked<Facts>("ranksat", asked, signal), run.name);
  const packed = answer.value;
  const values = packed?.arrays["values"];
  const rows = useMemo(() => (packed && values ? rowsOf(packed.facts, values, packed.arrays["there"]) : []), [packed]);
  const picture = useMemo(() => {
    if (!rows.length || !packed) return "";
    const away = Float64Array.from(rows.flatMap((r) => r.away.map((v) => Math.sign(v) * Math.min(1, Math.log10(1 + 1e3 * Math.abs(v)) / 3))));
    const slice = { facts: { cellRows: rows.length, cellColumns: packed.facts.ranks.length }, arrays: { low: away, there: packed.arrays["there"] }, shapes: {} } as unknown as Slice;
    return paintSlice(slice, 0, { lut: diverging(dark), low: -1, high: 1 }).toDataURL();
  }, [rows, dark]);
  if (run.ranks < 2) return <section class="ranksview" aria-label="Ranks"><p class="quiet">One rank wrote this run.</p></section>;
  if (!live) return <section class="ranksview" aria-label="Ranks"><p class="quiet">A report has the whole of all ranks; <code>torchtap view</code> shows each.</p></section>;
  const facts = packed?.facts;
  const apart = rows.filter((r) => r.apart).length;
  const broken = rows.filter((r) => r.bad.length > 0);
  const lacking = rows.filter((r) => r.lacking.length > 0 && r.lacking.length < (facts?.ranks.length ?? 0));
  const errors = findings.findings.filter((f) => f.severity === "error").length;
  // What must not be comes first, in the order of execution: the first one may be the cause of the rest.
  const sorted = [...rows].sort((a, b) => Number(b.bad.length > 0) - Number(a.bad.length > 0) || Number(b.apart) - Number(a.apart) || (a.apart ? 0 : b.most - a.most));
  const tall = Math.min(480, Math.max(80, rows.length * 14));
  const under = pointed && facts ? rows[pointed[0]] : undefined;
  const point = (event: MouseEvent) => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const at = (place: number, size: number, count: number) => Math.min(count - 1, Math.max(0, Math.floor((place / size) * count)));
    setPointed([at(event.clientY - box.top, box.height, rows.length), at(event.clientX - box.left, box.width, facts?.ranks.length ?? 1)]);
  };
  return (
    <section class="ranksview" aria-label="Ranks">
      <div class="tools">
        <KindAndStatistic kinds={kinds} kind={kind} names={names} statistic={statistic} />
        <label>at step <Field label="Step" value={step ?? facts?.step} change={(text) => adjust({ step: whole(text) })} /></label>
        <span class="space" />
        {facts && <Take name={`${run.name}-ranks`} csv={() => csv(["site", "held", ...facts.ranks.map((r) => `rank ${r}`)], rows.map((r) => [r.site, r.share, ...r.values.map((v, k) => (r.lacking.includes(facts.ranks[k] ?? -1) ? null : v))]))} />}
      </div>
      {answer.error && <p class="alarm" role="alert">{answer.error}</p>}
      {facts && (
        <>
          <p class="note" data-testid="statuses">{byStatus(facts).map(([status, ranks]) => (
            <span key={status} class={status === "interrupted" ? "chip broken-off" : "chip"}>{ranks.length > NAMED ? plural(ranks.length, "rank") : `rank ${ranks.join(", ")}`} {status}</span>
          ))}</p>
          {facts.absent.length > 0 && <p class="bad" data-testid="absent">{ranksText(facts.absent)} of the launch recorded nothing.</p>}
          <p class="note" data-testid="verdict">{apart
            ? <b>{plural(apart, "site")} that every rank holds the same {apart === 1 ? "differs" : "differ"} between ranks.</b>
            : broken.length === 0 && lacking.length === 0 && `At step ${grouped(facts.step)}, ranks that hold the same agree at ${plural(rows.length, "site")} (${kind ? kindWord(kind).toLowerCase() : "all kinds"}).`}
            {broken.length > 0 && <span class="bad"> {plural(broken.length, "site")} NaN or inf, first {siteWord(broken[0]?.site ?? "")} on {ranksText(broken[0]?.bad ?? [])}.</span>}
            {lacking.length > 0 && <span> {plural(lacking.length, "site")} not recorded by every rank at this step.</span>}
            {errors > 0 && <> <a href={href("findings", params)}>{plural(errors, "error")} found in this run</a>.</>}</p>
          <div class="labelled">
            <div class="rows" aria-hidden="true">{labels(rows.length, Math.floor(tall / 14)).map((i) => <span key={i} style={{ top: `${((i + 0.5) / rows.length) * 100}%` }} title={rows[i]?.site}>{siteWord(rows[i]?.site ?? "")}</span>)}</div>
            <img class="rankmap" style={{ height: `${tall}px` }} src={picture} onMouseMove={point} onMouseLeave={() => setPointed(null)} alt={`${rows.length} sites down, ${facts.ranks.length} ranks across: how far each rank is from the middle one`} />
            <div class="columns" aria-hidden="true">{labels(facts.ranks.length, 24).map((i) => <span key={i} style={{ left: `${((i + 0.5) / facts.ranks.length) * 100}%` }}>{facts.ranks[i]}</span>)}</div>
            <span class="axisname">rank</span>
          </div>
          <p class="quiet" role="status">{under && pointed
            ? `${siteWord(under.site)}, rank ${facts.ranks[pointed[1]] ?? ""}: ${under.lacking.includes(facts.ranks[pointed[1]] ?? -1) ? "not recorded" : show(under.values[pointed[1]] ?? NaN)}; the middle rank has ${show(under.middle)}`
            : "Sites down in the order of execution, ranks across; coloured by the distance from the middle rank."}</p>
          <div class="scroll tall" tabIndex={0} aria-label="Sites by ranks"><table data-testid="ranksat">
            <thead><tr><th>site</th><th class="whole">ranks hold</th><th class="number">middle rank</th><th class="number">farthest</th><th class="number">relative</th></tr></thead>
            <tbody>{sorted.slice(0, SHOWN).map((r) => (
              <tr key={r.site} class={r.apart ? "grave" : ""}>
                <td><a href={href("site", { ...params, site: r.site, step: facts.step })}>{siteWord(r.site)}</a></td>
                <td class="whole">{r.share === "same" ? "the same" : r.share || "–"}</td>
                <td class="number">{Number.isNaN(r.middle) && r.bad.length === 0 ? "not recorded" : show(r.middle)}</td>
                <td class={r.bad.length ? "number bad" : "number"}>{r.bad.length > 0 ? `${ranksText(r.bad)}: NaN or inf` : r.most > 0 ? `rank ${facts.ranks[r.worst] ?? ""}: ${show(r.values[r.worst] ?? NaN)}` : "–"}</td>
                <td class="number">{r.most > 0 ? (Number.isFinite(r.most) ? `${show(Number((100 * r.most).toPrecision(3)))} %` : r.bad.length ? "NaN" : "from zero") : "0"}</td>
              </tr>
            ))}</tbody>
          </table></div>
          {rows.length > SHOWN && <p class="note">{grouped(rows.length - SHOWN)} more; the saved table has them all.</p>}
        </>
      )}
    </section>
  );
}

// At most so many places of a row or column, evenly spread.
export const labels = (count: number, most: number): number[] => {
  const every = Math.max(1, Math.ceil(count / Math.max(1, most)));
  return Array.from({ length: Math.ceil(count / every) }, (_, i) => i * every);
};
