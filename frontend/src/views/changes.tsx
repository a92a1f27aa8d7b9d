// Which site changed most: one statistic at two steps, or of two runs, sorted by how much it differs.

import { useMemo } from "preact/hooks";
import { askPacked, live } from "../api";
import type { ViewProps } from "../app";
import { useAnswer } from "../data";
import { Field } from "../field";
import { grouped, plural, show } from "../numbers";
import { adjust, href, whole } from "../route";
import { csv } from "../take/save";
import { Take } from "../take/menu";
import { siteWord } from "../words";
import { kindsOf, statisticsOfKind, usualStatistic } from "./map";
import { KindAndStatistic } from "./pickers";

interface ChangeFacts { statistic: string; sites: string[] }
type Key = "relative" | "difference" | "before" | "after" | "order";
const SHOWN = 400;

export function ChangesView({ run, runs, about, params }: ViewProps) {
  const kinds = kindsOf(about);
  const kind = params["kind"] === "all" ? "" : kinds.includes(params["kind"] ?? "") ? params["kind"] ?? "" : kinds[0] ?? "";
  const names = statisticsOfKind(about, kind);
  const statistic = names.includes(params["statistic"] ?? "") ? params["statistic"] ?? "" : usualStatistic(names);
  const against = runs.find((r) => r.name === params["against"] && r.name !== run.name);
  const before = whole(params["before"]) ?? run.first;
  const after = whole(params["after"]) ?? (against ?? run).last;
  const asked = { run: run.name, phase: params["phase"], against: against?.name, statistic, kind, before: against ? after : before, after };
  const answer = useAnswer(names.length && live ? JSON.stringify([asked, run.revision, against?.revision]) : null, (signal) => askPacked<ChangeFacts>("changes", asked, signal), run.name);
  const key = (params["order"] ?? "relative") as Key;
  const rows = useMemo(() => {
    const packed = answer.value;
    if (!packed) return [];
    const take = (name: string, i: number) => packed.arrays[name]?.[i] ?? NaN;
    const all = packed.facts.sites.map((site, i) => ({
      site, order: -i, before: take("before", i), after: take("after", i), difference: take("difference", i), relative: take("relative", i),
      beforeStep: take("beforeSteps", i), afterStep: take("afterSteps", i), beforeBad: take("beforeBad", i), afterBad: take("afterBad", i),
    }));
    // What became NaN changed most; what was not recorded changed least.
    const size = (v: number) => (Number.isNaN(v) ? Infinity : Math.abs(v));
    const absent = (r: (typeof all)[number]) => Number.isNaN(r.beforeStep) || Number.isNaN(r.afterStep);
    return all.sort((a, b) => (key !== "order" && absent(a) !== absent(b) ? Number(absent(a)) - Number(absent(b)) : key === "order" ? b.order - a.order : compareSizes(key === "before" || key === "after" ? (Number.isNaN(a[key]) ? Infinity : a[key]) : size(a[key]), key === "before" || key === "after" ? (Number.isNaN(b[key]) ? Infinity : b[key]) : size(b[key]))));
  }, [answer.value, key]);
  const most = Math.max(...rows.map((r) => (Number.isFinite(r.relative) ? Math.abs(r.relative) : 0)), 1e-30);
  const heading = (name: Key, text: string) => (
    <th class={name === "order" ? "" : "number"} aria-sort={key === name ? "descending" : "none"}><button onClick={() => adjust({ order: name })}>{text}{key === name ? " ↓" : ""}</button></th>
  );
  if (!live) return <section class="changes" aria-label="Changes"><p class="quiet">A report cannot compare steps; <code>torchtap view</code> does.</p></section>;
  return (
    <section class="changes" aria-label="Changes">
      <div class="tools">
        <KindAndStatistic kinds={kinds} kind={kind} names={names} statistic={statistic} />
        {!against && <label>from step <Field label="First step" value={before} change={(text) => adjust({ before: whole(text) })} /></label>}
        <label>{against ? "at" : "to"} step <Field label="Second step" value={after} change={(text) => adjust({ after: whole(text) })} /></label>
        {runs.length > 1 && (
          <label>against
            <select aria-label="Other run" value={against?.name ?? ""} onChange={(e) => adjust({ against: e.currentTarget.value || null })}>
              <option value="">this run itself</option>
              {runs.filter((r) => r.name !== run.name).map((r) => <option key={r.name} value={r.name}>{r.name}</option>)}
            </select>
          </label>
        )}
        <span class="space" />
        <Take name={`${run.name}-changes`} csv={() => csv(["site", "before", "after", "difference", "relative"], rows.map((r) => [r.site, Number.isNaN(r.beforeStep) ? null : r.before, Number.isNaN(r.afterStep) ? null : r.after, r.difference, r.relative]))} />
      </div>
      {kinds.length === 0 && <p class="quiet">This run holds no statistics yet.</p>}
      {answer.error && <p class="alarm" role="alert">{answer.error}</p>}
      {rows.length > 0 && (
        <div class="scroll tall" tabIndex={0} aria-label="Changes by site"><table data-testid="changes">
          <thead><tr>
            {heading("order", "site")}
            {heading("before", against ? `${run.name}, step ${grouped(after ?? 0)}` : `step ${grouped(before ?? 0)}`)}
            {heading("after", against ? against.name : `step ${grouped(after ?? 0)}`)}
            {heading("difference", "difference")}
            {heading("relative", "relative")}
            <th><span class="unseen">size of the change</span></th>
          </tr></thead>
          <tbody>{rows.slice(0, SHOWN).map((r) => (
            <tr key={r.site}>
              <td><a href={href("site", { ...params, site: r.site, step: after })}>{siteWord(r.site)}</a></td>
              <Value value={r.before} step={r.beforeStep} asked={against ? after : before} bad={r.beforeBad} /><Value value={r.after} step={r.afterStep} asked={after} bad={r.afterBad} />
              <td class="number">{Number.isNaN(r.beforeStep) || Number.isNaN(r.afterStep) ? "–" : show(r.difference)}</td><td class="number">{Number.isNaN(r.beforeStep) || Number.isNaN(r.afterStep) ? "–" : percent(r.relative)}</td>
              <td class="size"><span class="meter"><i style={{ width: `${Math.min(100, (100 * Math.abs(r.relative)) / most) || 0}%` }} /></span></td>
            </tr>
          ))}</tbody>
        </table></div>
      )}
      {rows.length > SHOWN && <p class="note">{grouped(rows.length - SHOWN)} more; the saved table has them all.</p>}
    </section>
  );
}

const compareSizes = (a: number, b: number): number => (a === b ? 0 : b > a ? 1 : -1);

// A number with what a reader must know of it: NaN in red, values that are not finite, a record of another step.
function Value({ value, step, asked, bad }: { value: number; step: number; asked: number | null; bad: number }) {
  if (Number.isNaN(step)) return <td class="number quiet">not recorded</td>;
  return (
    <td class="number">
      <span class={Number.isFinite(value) ? "" : "bad"}>{show(value)}</span>
      {Number.isFinite(value) && bad > 0 && <span class="bad" title="The number is of the finite values alone"> {plural(bad, "value")} NaN or inf</span>}
      {asked !== null && step !== asked && <span class="quiet"> (step {grouped(step)})</span>}
    </td>
  );
}

function percent(share: number): string {
  if (!Number.isFinite(share)) return Number.isNaN(share) ? "NaN" : "from zero";
  return `${share > 0 ? "+" : ""}${show(Number((100 * share).toPrecision(3)))} %`;
}
