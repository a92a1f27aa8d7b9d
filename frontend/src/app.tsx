// The frame: which run, which view, the model on the left, and the keys.

import { useEffect, useState } from "preact/hooks";
import { live } from "./api";
import { pictureShown, useAbout, useFindings, useRuns } from "./data";
import { Help } from "./help";
import { plural } from "./numbers";
import { adjust, go, href, useRoute, VIEWS, type ViewName } from "./route";
import { toggleTheme, useDark } from "./theme";
import { ModelTree } from "./tree";
import type { About, Findings, RunLine } from "./types";
import { AttentionView } from "./views/attention";
import { CompareView } from "./views/compare";
import { FindingsView } from "./views/findings";
import { MapView } from "./views/map";
import { SiteView } from "./views/site";

const WORDS: Record<ViewName, string> = {
  map: "Map", site: "Site", attention: "Attention", compare: "Compare", findings: "Findings",
};
const NONE: Findings = { findings: [], marks: {}, revision: -1 };

export interface ViewProps {
  run: RunLine;
  runs: RunLine[];
  about: About;
  findings: Findings;
  params: Record<string, string>;
}

export function App() {
  const { runs, comparison, error } = useRuns();
  const route = useRoute();
  const dark = useDark();
  const [help, setHelp] = useState(false);
  const run = runs?.find((r) => String(r.id) === (route.params["run"] ?? "0")) ?? runs?.[0];
  const about = useAbout(run);
  const findings = useFindings(run);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const typing = (event.target as HTMLElement | null)?.closest("input:not([type=range]), select, textarea");
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const number = Number(event.key);
      if (event.key === "/") {
        event.preventDefault();
        document.getElementById("search")?.focus();
      } else if (event.key === "?") setHelp((h) => !h);
      else if (event.key === "Escape") setHelp(false);
      else if (event.key === "t") toggleTheme();
      else if (number >= 1 && number <= VIEWS.length) go(VIEWS[number - 1] ?? "map", keep(route.params));
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [route]);

  useEffect(() => {
    if (route.view !== "map") pictureShown();
  }, [route.view]);

  useEffect(() => {
    document.title = run ? `${run.name} · torchtap` : "torchtap";
  }, [run?.name]);

  if (!runs || !run) return <div class="lonely">{error ?? "Reading the run …"}</div>;
  const found = findings.value ?? NONE;
  const grave = found.findings.filter((f) => f.severity === "error").length;
  const props: ViewProps | null = about.value && { run, runs, about: about.value, findings: found, params: route.params };
  return (
    <div class="app">
      <header>
        <a class="brand" href={href("map", { run: run.id })}><Logo />torchtap</a>
        {runs.length > 1
          ? <select aria-label="Run" value={run.id} onChange={(e) => adjust({ run: e.currentTarget.value, site: null, from: null, to: null, top: null, bottom: null })}>
              {runs.map((r) => <option key={r.id} value={r.id}>{r.name}</option>)}
            </select>
          : <span class="runname" title={run.created}>{run.name}</span>}
        <span class="progress">
          {live && run.status === "recording" && <span class="live" title="The training is still writing; the page follows">live</span>}
          {run.status === "interrupted" && <span class="broken-off" title="The writing process is gone and did not close the run">interrupted</span>}
          {plural(run.steps, "step")} · {plural(run.sites, "site")}
        </span>
        <span class="space" />
        <div class="views" role="tablist">
          {VIEWS.map((view) => (
            <a key={view} role="tab" aria-selected={route.view === view} class={route.view === view ? "on" : ""} href={href(view, keep(route.params))}>
              {WORDS[view]}
              {view === "findings" && found.findings.length > 0 &&
                <span class={`badge ${grave ? "nan" : "warning"}`}>{found.findings.length}</span>}
            </a>
          ))}
        </div>
        <button class="icon" onClick={toggleTheme} title="Light or dark (t)" aria-label="Light or dark">{dark ? "☀" : "☾"}</button>
        <button class="icon" onClick={() => setHelp(true)} title="Keys (?)" aria-label="Keys">?</button>
      </header>
      {(error || run.problem) && <div class="alarm" role="alert">{error ?? run.problem}</div>}
      <div class="body">
        {props && <ModelTree about={props.about} marks={found.marks} run={run.id} selected={route.view === "site" ? route.params["site"] ?? "" : ""} under={route.view === "map" ? route.params["under"] ?? "" : ""} />}
        <main>
          {about.error && <p class="alarm">{about.error}</p>}
          {props && route.view === "map" && <MapView {...props} />}
          {props && route.view === "site" && <SiteView {...props} />}
          {props && route.view === "attention" && <AttentionView {...props} />}
          {props && route.view === "compare" && <CompareView {...props} given={comparison} />}
          {props && route.view === "findings" && <FindingsView {...props} busy={findings.busy} />}
        </main>
      </div>
      {help && <Help close={() => setHelp(false)} />}
    </div>
  );
}

// What stays when the view changes.
function keep(params: Record<string, string>): Record<string, string | undefined> {
  return { run: params["run"], site: params["site"] };
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
