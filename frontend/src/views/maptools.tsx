// The knobs of the map.

import type { ComponentChildren } from "preact";
import { live } from "../api";
import { Field } from "../field";
import { colouringOf } from "../heat/colouring";
import type { Part } from "../heat/grid";
import { StepRange } from "../steprange";
import { adjust } from "../route";
import type { About, RunLine } from "../types";
import { kindWord, siteWord, statisticWord } from "../words";

interface Props {
  about: About;
  run: RunLine;
  runs: RunLine[];
  params: Record<string, string>;
  kinds: string[];
  kind: string;
  names: string[];
  statistic: string;
  log: boolean;
  under: string;
  part: Part;
  counts: number[];
  fold: number | null;
  against: string | null;
  relative: boolean;
  loss: string | null;
  children: ComponentChildren;
}

export function MapTools({ about, run, runs, params, kinds, kind, names, statistic, log, under, part, counts, fold, against, relative, loss, children }: Props) {
  const zoomed = part.from !== null || part.to !== null || part.top !== null || part.bottom !== null;
  const logged = about.sites.filter((s) => s.kind === "value").map((s) => s.name);
  const { mode, low, high } = colouringOf(params["colours"]);
  return (
    <>
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
        {children}
      </div>
      <details class="more" open={against !== null || mode !== "all"}>
        <summary>More: rows, colours, steps, difference</summary>
        <div class="tools">
          {counts.length > 1 && live && (
            <label>rows
              <select aria-label="Rows" value={fold ?? "none"} onChange={(e) => adjust({ fold: e.currentTarget.value, top: null, bottom: null })}>
                <option value="none">every site</option>
                {counts.map((count, i) => <option key={i} value={i + 1}>{count} modules, {i + 1} deep</option>)}
              </select>
            </label>
          )}
          {live && fold === null && <label><input type="checkbox" aria-label="Fold structures" checked={params["leaves"] !== "all"} onChange={(e) => adjust({ leaves: e.currentTarget.checked ? null : "all", top: null, bottom: null })} /> fold caches and other structures</label>}
          <label>colours
            <select aria-label="Colours span" value={mode} onChange={(e) => adjust({ colours: e.currentTarget.value === "fixed" ? "0:1" : e.currentTarget.value === "all" ? null : e.currentTarget.value })}>
              <option value="all">over the whole map</option>
              <option value="view">over what is in view</option>
              <option value="row">each row its own</option>
              <option value="fixed">between two numbers</option>
            </select>
          </label>
          {mode === "fixed" && (
            <label>from
              <Field label="Lowest colour" value={low} change={(text) => adjust({ colours: `${Number(text)}:${high}` })} /> to
              <Field label="Highest colour" value={high} change={(text) => adjust({ colours: `${low}:${Number(text)}` })} />
            </label>
          )}
          <StepRange from={part.from} to={part.to} />
          {logged.length > 0 && (
            <label>strip
              <select aria-label="Strip" value={loss ?? "none"} onChange={(e) => adjust({ strip: e.currentTarget.value })}>
                {logged.map((n) => <option key={n} value={n}>{siteWord(n)}</option>)}
                <option value="none">none</option>
              </select>
            </label>
          )}
          {runs.length > 1 && live && (
            <label>difference to
              <select aria-label="Difference to" value={against ?? ""} onChange={(e) => adjust({ against: e.currentTarget.value || null, scale: null })}>
                <option value="">nothing</option>
                {runs.filter((r) => r.name !== run.name).map((r) => <option key={r.name} value={r.name}>{r.name}</option>)}
              </select>
            </label>
          )}
          {against && (
            <div class="switch" role="group" aria-label="Difference">
              <button aria-pressed={relative} onClick={() => adjust({ change: null, scale: null })}>relative</button>
              <button aria-pressed={!relative} onClick={() => adjust({ change: "difference", scale: null })}>absolute</button>
            </div>
          )}
        </div>
      </details>
    </>
  );
}
