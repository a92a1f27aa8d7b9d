// Every run in a table: sort, filter, pick some to overlay or compare.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Runs } from "../data";
import { grouped, plural, show } from "../numbers";
import { adjust, href, joinNames, splitNames } from "../route";
import { Actions } from "../runs/actions";
import { cell, groupsOf, shownColumns, sorted, varied, valuesOf, type Column } from "../runs/columns";
import { fact, filterOf, spelled, STATISTICS } from "../runs/filter";
import { Layers } from "../runs/layers";
import { Parallel } from "../runs/parallel";
import { ScatterView } from "../runs/scatter";
import { Spark } from "../runs/spark";
import { csv } from "../take/save";
import { Take } from "../take/menu";
import type { RunLine } from "../types";

const ROW = 32;
const SHAPES = ["table", "scatter", "parallel", "layers"] as const;
type Row = RunLine | { group: string; runs: RunLine[] };
const STATUS: Record<string, string> = { recording: "live", closed: "finished", interrupted: "interrupted", "": "…" };

export function RunsView({ runs, managed, folder, pending, again, params }: Runs & { params: Record<string, string> }) {
  const box = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState({ top: 0, height: 900 });
  const all = runs ?? [];
  const filter = params["filter"] ?? "";
  const archived = params["archived"] === "yes";
  const [key = "created", direction = "down"] = (params["sort"] ?? "created,down").split(",");
  const picked = splitNames(params["with"]).filter((name) => all.some((r) => r.name === name));
  const shape = SHAPES.find((s) => s === params["show"]) ?? "table";
  const statistics = params["stats"]?.split(",") ?? ["last", "best"];
  const columns = useMemo(() => shownColumns(all, statistics, params["columns"] ?? ""), [runs, params["stats"], params["columns"]]);
  const wanted = useMemo(() => {
    const test = filterOf(filter);
    return sorted(all.filter((r) => (archived || !r.archived) && test(r)), key, direction === "down");
  }, [runs, filter, archived, key, direction]);

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const look = () => setSeen({ top: element.scrollTop, height: element.clientHeight });
    const watcher = new ResizeObserver(look);
    watcher.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => { watcher.disconnect(); element.removeEventListener("scroll", look); };
  }, []);

  const labels = useMemo(() => varied(all), [runs]);
  const group = [...labels, "status", "tags"].includes(params["group"] ?? "") ? params["group"] ?? "" : "";
  const groups = useMemo(() => (group ? groupsOf(wanted, group) : []), [wanted, group]);
  const rows: Row[] = useMemo(() => (group ? groups.flatMap(([name, own]) => [{ group: name, runs: own }, ...own]) : wanted), [wanted, groups]);
  const toggle = (name: string) => adjust({ with: joinNames(picked.includes(name) ? picked.filter((p) => p !== name) : [...picked, name]) || null });
  const first = Math.max(0, Math.floor(seen.top / ROW) - 8);
  const last = Math.min(rows.length, Math.ceil((seen.top + seen.height) / ROW) + 8);
  const hidden = all.filter((r) => r.archived).length;
  const allPicked = wanted.length > 0 && wanted.every((r) => picked.includes(r.name));
  const chosen = { ...params, run: picked[0] ?? params["run"], with: params["with"] };
  return (
    <section class="runs" aria-label="Runs">
      <div class="tools">
        <input
          id="filter" type="search" value={filter} aria-label="Filter runs" placeholder="Filter: words, or lr > 0.001 and optimizer = adam"
          onInput={(e) => adjust({ filter: e.currentTarget.value || null })}
        />
        <span class="quiet" role="status">{wanted.length === all.length ? plural(all.length, "run") : `${grouped(wanted.length)} of ${plural(all.length, "run")}`}{pending > 0 && `, reading ${grouped(pending)} …`}</span>
        {picked.length > 0 && (
          <>
            <a class="button" href={href("scalars", chosen)}>Overlay {picked.length}</a>
            {picked.length > 1 && <a class="button" href={href("compare", { ...chosen, a: picked[0], b: picked[1] })}>Compare</a>}
            <button class="chip" onClick={() => adjust({ with: null })}>{picked.length} picked ×</button>
          </>
        )}
        <span class="space" />
        {labels.length > 0 && (
          <label>group by
            <select aria-label="Group by" value={group} onChange={(e) => adjust({ group: e.currentTarget.value || null })}>
              <option value="">nothing</option>
              {[...labels, "status", "tags"].map((k) => <option key={k} value={k}>{k}</option>)}
            </select>
          </label>
        )}
        {all.length > 1 && (
          <div class="switch" role="group" aria-label="Show as">
            {SHAPES.map((s) => <button key={s} aria-pressed={shape === s} onClick={() => adjust({ show: s === "table" ? null : s })}>{s}</button>)}
          </div>
        )}
        {hidden > 0 && <button class="chip" aria-pressed={archived} onClick={() => adjust({ archived: archived ? null : "yes" })}>{hidden} archived</button>}
        <Take name="runs" csv={() => csv([...columns.map((c) => c.title), "tags"], wanted.map((r) => [...columns.map((c) => cell(r, c)), r.tags.join(" ")]))} />
      </div>
      {shape === "table" && valuesOf(all).length > 1 && (
        <div class="tools">
          <span class="chips" role="group" aria-label="Of each logged value">
            {STATISTICS.map((s) => <button key={s} class="chip" aria-pressed={statistics.includes(s)} onClick={() => adjust({ stats: STATISTICS.filter((x) => statistics.includes(x) !== (x === s)).join(",") || "none" })}>{s}</button>)}
          </span>
          <input type="search" class="columnsfilter" aria-label="Columns" placeholder="Columns: words of their titles" value={params["columns"] ?? ""} onInput={(e) => adjust({ columns: e.currentTarget.value || null })} />
        </div>
      )}
      {shape === "scatter" && <ScatterView runs={wanted} group={group} params={params} />}
      {shape === "parallel" && <Parallel runs={wanted} params={params} />}
      {shape === "layers" && <Layers runs={wanted} params={params} />}
      {all.length === 0 && <p class="quiet">{folder ? "No run in this folder yet. The table fills as soon as one is recorded." : "Reading …"}</p>}
      <div class="runtable" hidden={shape !== "table"} ref={box} tabIndex={0} aria-label="Table of runs">
        {all.length > 0 && (
          <table aria-rowcount={rows.length + 1}>
            <thead><tr>
              <th class="pick"><input type="checkbox" aria-label="Pick all shown" checked={allPicked} onChange={() => adjust({ with: allPicked ? null : joinNames(wanted.slice(0, 50).map((r) => r.name)) })} /></th>
              {columns.map((c) => <Heading key={c.key} column={c} sort={key} down={direction === "down"} />)}
              <th>tags</th>
              {managed && <th>change</th>}
            </tr></thead>
            <tbody>
              {first > 0 && <tr style={{ height: `${first * ROW}px` }} aria-hidden="true"><td colSpan={columns.length + 3} /></tr>}
              {rows.slice(first, last).map((run, i) => ("group" in run
                ? <GroupRow key={`group ${run.group}`} at={first + i + 2} label={group} name={run.group} runs={run.runs} columns={columns} first={groups[0]?.[0] ?? ""} params={params} />
                : <tr key={run.name} aria-rowindex={first + i + 2} class={`${picked.includes(run.name) ? "on" : ""} ${run.archived ? "archived" : ""}`}>
                  <td class="pick"><input type="checkbox" aria-label={`Pick ${run.name}`} checked={picked.includes(run.name)} onChange={() => toggle(run.name)} /></td>
                  {columns.map((c) => <Cell key={c.key} run={run} column={c} params={params} />)}
                  <td>{run.tags.map((tag) => <button key={tag} class="chip" title="Only runs with this tag" onClick={() => adjust({ filter: `tag = ${tag}` })}>{tag}</button>)}</td>
                  {managed && <td><Actions run={run} done={again} /></td>}
                </tr>
              ))}
              {last < rows.length && <tr style={{ height: `${(rows.length - last) * ROW}px` }} aria-hidden="true"><td colSpan={columns.length + 3} /></tr>}
            </tbody>
          </table>
        )}
      </div>
    </section>
  );
}

// A group of runs: how many, and the mean of each column of numbers over those that have a finite one.
function GroupRow({ at, label, name, runs, columns, first, params }: { at: number; label: string; name: string; runs: RunLine[]; columns: Column[]; first: string; params: Record<string, string> }) {
  const mean = (column: Column): string => {
    const all = runs.map((r) => fact(r, column.key)).filter((v): v is number => typeof v === "number");
    const finite = all.filter(Number.isFinite);
    if (!column.number || finite.length === 0) return all.length > 0 ? "NaN" : "";
    const lost = all.length - finite.length;
    return `mean ${show(finite.reduce((a, b) => a + b, 0) / finite.length)}${lost > 0 ? `, ${lost} NaN` : ""}`;
  };
  return (
    <tr class="grouprow" aria-rowindex={at}>
      <td class="pick" />
      {columns.map((c) => (c.key === "name"
        ? <td key={c.key} class="name"><b>{label} = {name}</b> <span class="quiet">{plural(runs.length, "run")}</span> {name !== first && <a href={href("map", { ...params, run: runs[0]?.name, group: label, of: name, minus: first })}>difference to {first} on the map</a>}</td>
        : <td key={c.key} class="number quiet">{["size", "created", "status"].includes(c.key) ? "" : mean(c)}</td>))}
      <td />
    </tr>
  );
}

function Heading({ column, sort, down }: { column: Column; sort: string; down: boolean }) {
  const on = column.key === sort;
  return (
    <th class={column.number ? "number" : ""} aria-sort={on ? (down ? "descending" : "ascending") : "none"}>
      <button onClick={() => adjust({ sort: `${column.key},${on && down ? "up" : on ? "down" : column.number || column.key === "created" ? "down" : "up"}` })}>
        {column.title}{on ? (down ? " ↓" : " ↑") : ""}
      </button>
    </th>
  );
}

function Cell({ run, column, params }: { run: RunLine; column: Column; params: Record<string, string> }) {
  if (column.key === "name") {
    return <td class="name"><a href={href("map", { ...params, run: run.name })} title={run.problem ?? run.damage ?? run.name}>{run.name}</a>{(run.problem ?? run.damage) && <span class="bad" title={run.problem ?? run.damage ?? ""}> {run.problem || run.steps === 0 ? "unreadable" : "damaged"}</span>}</td>;
  }
  if (column.key === "status") {
    return <td><span class={run.status === "recording" ? "live" : run.status === "interrupted" ? "broken-off" : "quiet"}>{STATUS[run.status] ?? run.status}</span></td>;
  }
  if (column.key === "loss") {
    if (!run.loss) return <td class="number" />;
    const last = spelled(run.loss.last);
    return <td class="number loss"><Spark values={run.loss.spark} broken={run.loss.broken} /> <span class={Number.isFinite(last) ? "" : "bad"}>{show(last)}</span></td>;
  }
  if (column.key === "findings") {
    if (!run.findings) return <td class="number quiet">{run.known ? "" : "…"}</td>;
    const { errors, warnings, judged } = run.findings;
    return (
      <td class="number">
        {errors + warnings === 0 ? <span class="quiet" title={judged ? "" : "Too little was recorded to call this training healthy"}>{judged ? "none" : "not judged"}</span> : (
          <a href={href("findings", { ...params, run: run.name })} title={`${plural(errors, "error")}, ${plural(warnings, "warning")}`}>
            {errors > 0 && <span class="badge nan">{errors}<span class="unseen"> {errors === 1 ? "error" : "errors"}</span></span>} {warnings > 0 && <span class="badge warning">{warnings}<span class="unseen"> {warnings === 1 ? "warning" : "warnings"}</span></span>}
          </a>
        )}
      </td>
    );
  }
  const value = fact(run, column.key);
  const bad = typeof value === "number" && !Number.isFinite(value) ? " bad" : "";
  return <td class={(column.number ? "number" : "") + bad} title={`${column.title}: ${cell(run, column) || "not logged"}`}>{cell(run, column)}</td>;
}
