// The frame: which run, which view, the model on the left, and the keys.

import { useEffect, useState } from "preact/hooks";
import { live } from "./api";
import { pictureShown, useAbout, useFindings, useRuns } from "./data";
import { Header, viewWord } from "./header";
import { Help } from "./help";
import { setUsual, go, useRoute, VIEWS } from "./route";
import { toggleTheme } from "./theme";
import { ModelTree } from "./tree";
import type { About, Findings, RunLine } from "./types";
import { AttentionView } from "./views/attention";
import { ChangesView } from "./views/changes";
import { CompareView } from "./views/compare";
import { FindingsView } from "./views/findings";
import { MapView } from "./views/map";
import { RanksView } from "./views/ranksview";
import { RunsView } from "./views/runs";
import { ScalarsView } from "./views/scalars";
import { SiteView } from "./views/site";

const NONE: Findings = { findings: [], marks: {}, verdict: "not judged", summary: "", revision: -1 };

export interface ViewProps {
  run: RunLine;
  runs: RunLine[];
  about: About;
  findings: Findings;
  params: Record<string, string>;
}

export function App() {
  const listed = useRuns();
  const { runs, comparison, error, folder } = listed;
  const route = useRoute();
  const [help, setHelp] = useState(false);
  const [drawer, setDrawer] = useState(false);
  const named = route.params["run"];
  const found = named === undefined ? runs?.[0] : runs?.find((r) => r.name === named);
  const many = folder || (runs?.length ?? 0) > 1;
  const view = route.view ?? (many && !comparison ? "runs" : "map");
  setUsual(view);
  const alone = view !== "runs" && view !== "scalars"; // the view is about one run
  const run = alone && found ? found : undefined;
  const about = useAbout(run);
  const findings = useFindings(run);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const typing = (event.target as HTMLElement | null)?.closest("input:not([type=range]):not([type=checkbox]), select, textarea, dialog");
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const number = Number(event.key);
      if (event.key === "/") {
        event.preventDefault();
        setDrawer(true);
        requestAnimationFrame(() => (document.getElementById("search") ?? document.getElementById("filter"))?.focus());
      } else if (event.key === "?") setHelp((h) => !h);
      else if (event.key === "t") toggleTheme();
      else if (number >= 1 && number <= VIEWS.length) go(VIEWS[number - 1] ?? "map", route.params);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [route]);

  useEffect(() => {
    if (view !== "map") pictureShown();
    setDrawer(false);
  }, [view, route.params["site"], route.params["under"]]);

  useEffect(() => {
    document.title = found && alone ? `${found.name} · torchtap` : "torchtap";
  }, [found?.name, alone]);

  if (!runs) return <div class="lonely" role="status">{error ?? "Reading the runs …"}</div>;
  const trouble = run?.problem ?? (run?.steps === 0 ? run.damage : null);
  const marks = findings.value ?? NONE;
  const props: ViewProps | null = run && about.value ? { run, runs, about: about.value, findings: marks, params: route.params } : null;
  return (
    <div class="app">
      <Header {...{ runs, run: found, view, params: route.params, findings: marks, many, alone }} help={() => setHelp(true)} drawer={() => setDrawer((d) => !d)} />
      {(error || trouble) && <div class="alarm" role="alert">{error ?? trouble}</div>}
      <div class={`body ${drawer ? "drawn" : ""}`}>
        {props && <ModelTree about={props.about} marks={marks.marks} params={route.params} selected={view === "site" ? route.params["site"] ?? "" : ""} under={view === "map" ? route.params["under"] ?? "" : ""} />}
        <main>
          {view !== "site" && view !== "findings" && found && <h1 class="unseen">{viewWord(view)}</h1>}
          {alone && !found && <Missing name={named} any={runs.length > 0} />}
          {about.error && <p class="alarm">{about.error}</p>}
          {view === "runs" && <RunsView {...listed} params={route.params} />}
          {view === "scalars" && <ScalarsView runs={runs} run={found} params={route.params} />}
          {props && view === "map" && <MapView {...props} />}
          {props && view === "site" && <SiteView {...props} />}
          {props && view === "attention" && <AttentionView {...props} />}
          {props && view === "changes" && <ChangesView {...props} />}
          {props && view === "compare" && <CompareView {...props} given={comparison} />}
          {props && view === "ranks" && <RanksView {...props} />}
          {props && view === "findings" && <FindingsView {...props} busy={findings.busy} />}
        </main>
      </div>
      {help && <Help close={() => setHelp(false)} />}
    </div>
  );
}

function Missing({ name, any }: { name: string | undefined; any: boolean }) {
  return (
    <section class="missing"><h1>{name === undefined ? "There is no run here." : <>There is no run called <code>{name}</code> here.</>}</h1>
      <p>{live ? "Its folder may have been deleted, moved or renamed." : "It is not part of this report."} {any && <a href="#/runs">Show the runs that are there</a>}</p>
    </section>
  );
}
