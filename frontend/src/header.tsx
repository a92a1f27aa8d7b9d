// The line on top: the run and how far it came, the views, the link to this picture.

import { useState } from "preact/hooks";
import { live } from "./api";
import { plural } from "./numbers";
import { adjust, href, link, VIEWS, type ViewName } from "./route";
import { toggleTheme, useDark } from "./theme";
import type { Findings, RunLine } from "./types";

const WORDS: Record<ViewName, string> = {
  runs: "Runs", scalars: "Scalars", map: "Map", site: "Site", attention: "Attention", changes: "Changes", compare: "Compare", findings: "Findings", ranks: "Ranks",
};

export const viewWord = (view: ViewName): string => WORDS[view];

interface Props {
  runs: RunLine[];
  run: RunLine | undefined;
  view: ViewName;
  params: Record<string, string>;
  findings: Findings;
  many: boolean;
  alone: boolean;
  help: () => void;
  drawer: () => void;
}

export function Header({ runs, run, view, params, findings, many, alone, help, drawer }: Props) {
  const dark = useDark();
  const [copied, setCopied] = useState(false);
  const grave = findings.findings.filter((f) => f.severity === "error").length;
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(link());
    } catch {
      window.prompt("The link to this view", link()); // a browser that does not let a page copy
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <header>
      <button class="icon menu-button" onClick={drawer} aria-label="Model">☰</button>
      <a class="brand" href={many ? "#/runs" : href("map", { run: run?.name })} aria-label="torchtap, start"><Logo /><span>torchtap</span></a>
      {alone && run && (runs.length > 1
        ? <select aria-label="Run" value={run.name} onChange={(e) => adjust({ run: e.currentTarget.value, top: null, bottom: null })}>
            {runs.filter((r) => !r.archived || r === run).map((r) => <option key={r.name} value={r.name}>{r.name}</option>)}
          </select>
        : <span class="runname" title={run.created}>{run.name}</span>)}
      {alone && run && (
        <span class="progress" role="status">
          {live && run.status === "recording" && <span class="live" title="The training is still writing; the page follows">live</span>}
          {run.status === "interrupted" && <span class="broken-off" title="The writing process is gone and did not close the run">interrupted</span>}
          {run.known && <span class="count">{plural(run.steps, "step")} · {plural(run.sites, "site")}</span>}
        </span>
      )}
      {alone && run && live && run.phases.length > 1 && (
        <select aria-label="Phase" title="Which records: training, evaluation" value={params["phase"] ?? ""} onChange={(e) => adjust({ phase: e.currentTarget.value || null })}>
          <option value="">{run.phases[0]} first</option>
          {run.phases.map((phase) => <option key={phase} value={phase}>{phase} alone</option>)}
        </select>
      )}
      <span class="space" />
      <nav class="views" aria-label="Views">
        {VIEWS.filter((name) => name !== "ranks" || (alone && (run?.ranks ?? 1) > 1)).map((name) => (
          <a key={name} aria-current={view === name ? "page" : undefined} class={view === name ? "on" : ""} href={href(name, params)}>
            {WORDS[name]}
            {name === "findings" && findings.findings.length > 0 &&
              <span class={`badge ${grave ? "nan" : "warning"}`}>{findings.findings.length}</span>}
          </a>
        ))}
      </nav>
      {live && <button class="icon word" onClick={() => void copy()} title="Copy the link to this view" aria-label="Copy link">{copied ? "copied" : "link"}</button>}
      <button class="icon" onClick={toggleTheme} title="Light or dark (t)" aria-label="Light or dark">{dark ? "☀" : "☾"}</button>
      <button class="icon" onClick={help} title="Keys (?)" aria-label="Keys">?</button>
    </header>
  );
}

function Logo() {
  return (
    <svg width="20" height="20" viewBox="0 0 20 20" aria-hidden="true">
      <rect x="1" y="2" width="18" height="3.4" rx="1.2" fill="var(--map-a)" />
      <rect x="1" y="8.3" width="12" height="3.4" rx="1.2" fill="var(--map-b)" />
      <rect x="1" y="14.6" width="7" height="3.4" rx="1.2" fill="var(--map-c)" />
    </svg>
  );
}
