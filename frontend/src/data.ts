// What the views share: the list of runs, asked again while any is still written, and answers as state.

import { useEffect, useRef, useState } from "preact/hooks";
import { AskError, askJson, live, type Params } from "./api";
import type { About, Findings, RunLine, RunsAnswer } from "./types";

export interface Answer<T> {
  value: T | null;
  error: string | null;
  busy: boolean;
}

// Ask whenever the key changes. The last answer stays on screen until the next one is there, unless it is about
// something else: then it would lie.
export function useAnswer<T>(key: string | null, ask: (signal: AbortSignal) => Promise<T>, subject = ""): Answer<T> {
  const [state, setState] = useState<Answer<T> & { subject: string }>({ value: null, error: null, busy: true, subject });
  const latest = useRef(ask);
  latest.current = ask;
  useEffect(() => {
    if (key === null) {
      setState({ value: null, error: null, busy: false, subject });
      return;
    }
    const stop = new AbortController();
    setState((old) => (old.subject === subject ? { ...old, busy: true } : { value: null, error: null, busy: true, subject }));
    latest.current(stop.signal).then(
      (value) => !stop.signal.aborted && setState({ value, error: null, busy: false, subject }),
      (error: unknown) => {
        if (stop.signal.aborted) return;
        const gone = error instanceof AskError && error.status === 0; // the server is away: what was drawn stays
        setState((old) => ({ value: gone && old.subject === subject ? old.value : null, error: error instanceof Error ? error.message : String(error), busy: false, subject }));
      },
    );
    return () => stop.abort();
  }, [key]);
  return state.subject === subject ? state : { value: null, error: null, busy: true };
}

export function useJson<T>(question: string, params: Params | null): Answer<T> {
  const key = params === null ? null : `${question}${JSON.stringify(params)}`;
  return useAnswer<T>(key, (signal) => {
    const { revision: _, ...asked } = params ?? {}; // only makes the key change when the run has grown
    return askJson<T>(question, asked, signal);
  }, `${params?.["run"] ?? ""} ${params?.["site"] ?? ""}`);
}

export interface Runs {
  runs: RunLine[] | null;
  comparison: boolean;
  managed: boolean;
  folder: boolean;
  pending: number;
  error: string | null;
  again: () => void; // look now
}

const OFTEN = 1000;
const SELDOM = 5000;
const FILLING = 30;

export function useRuns(): Runs {
  const [state, setState] = useState<Omit<Runs, "again">>({ runs: null, comparison: false, managed: false, folder: false, pending: 0, error: null });
  const known = useRef(new Map<string, RunLine>());
  const tick = useRef(0);
  const viewer = useRef("");
  const wake = useRef<() => void>(() => undefined);
  useEffect(() => {
    let timer = 0;
    let over = false;
    const look = async () => {
      let pause = SELDOM;
      try {
        const found = await askJson<RunsAnswer>("runs", { since: tick.current });
        if (over) return;
        if (viewer.current !== found.viewer && viewer.current !== "") { // started again: ask for everything
          viewer.current = found.viewer;
          known.current.clear();
          tick.current = 0;
          return void look();
        }
        viewer.current = found.viewer;
        const news = found.runs.length > 0 || found.names.length !== known.current.size;
        tick.current = found.tick;
        for (const line of found.runs) known.current.set(line.name, line);
        const there = new Set(found.names);
        for (const name of [...known.current.keys()]) if (!there.has(name)) known.current.delete(name);
        const runs = found.names.flatMap((name) => known.current.get(name) ?? []);
        setState((old) => (!news && old.runs && old.error === null && old.pending === found.pending ? old
          : { runs: news || !old.runs ? runs : old.runs, comparison: found.comparison, managed: found.managed, folder: found.folder, pending: found.pending, error: null }));
        if (runs.some((run) => run.status === "recording")) pause = OFTEN;
        else if (found.folder) pause = 2000;
        if (found.pending > 0) pause = FILLING;
        else if (found.judging > 0) pause = Math.min(pause, 300);
      } catch (error) {
        if (over) return;
        setState((old) => ({ ...old, error: error instanceof Error ? error.message : String(error) }));
        pause = OFTEN;
      }
      window.clearTimeout(timer);
      if (live && !over) timer = window.setTimeout(look, document.hidden ? Math.max(pause, SELDOM) : pause);
    };
    wake.current = () => void look();
    void look();
    return () => {
      over = true;
      window.clearTimeout(timer);
    };
  }, []);
  return { ...state, again: wake.current };
}

export const useAbout = (run: RunLine | undefined): Answer<About> =>
  useJson<About>("about", run ? { run: run.name, revision: run.revision } : null);

// Findings read the whole run: they wait until the first picture is there, so as not to delay it.
let tellShown: () => void = () => undefined;
const shown = new Promise<void>((tell) => { tellShown = tell; });
export const pictureShown = (): void => tellShown();

export function useFindings(run: RunLine | undefined): Answer<Findings> {
  return useAnswer<Findings>(run ? JSON.stringify([run.name, run.revision]) : null, async (signal) => {
    await Promise.race([shown, new Promise((go) => setTimeout(go, 4000))]);
    return askJson<Findings>("findings", { run: run?.name }, signal);
  }, run?.name);
}

export const statisticsOf = (about: About, siteName: string): string[] => {
  const site = about.sites.find((s) => s.name === siteName);
  return site ? about.statistics[site.statistics] ?? [] : [];
};
