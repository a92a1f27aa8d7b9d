// What the views share: the list of runs, asked again while any is still written, and answers as state.

import { useEffect, useRef, useState } from "preact/hooks";
import { askJson, live, type Params } from "./api";
import type { About, Findings, RunLine } from "./types";

export interface Answer<T> {
  value: T | null;
  error: string | null;
  busy: boolean;
}

// Ask whenever the key changes; the last answer stays on screen until the next one is there.
export function useAnswer<T>(key: string | null, ask: (signal: AbortSignal) => Promise<T>): Answer<T> {
  const [state, setState] = useState<Answer<T> & { key: string | null }>({ value: null, error: null, busy: true, key: null });
  const latest = useRef(ask);
  latest.current = ask;
  useEffect(() => {
    if (key === null) {
      setState({ value: null, error: null, busy: false, key });
      return;
    }
    const stop = new AbortController();
    setState((old) => ({ ...old, busy: true }));
    latest.current(stop.signal).then(
      (value) => !stop.signal.aborted && setState({ value, error: null, busy: false, key }),
      (error: unknown) => {
        if (stop.signal.aborted) return;
        setState({ value: null, error: error instanceof Error ? error.message : String(error), busy: false, key });
      },
    );
    return () => stop.abort();
  }, [key]);
  return state;
}

export function useJson<T>(question: string, params: Params | null): Answer<T> {
  const key = params === null ? null : `${question}${JSON.stringify(params)}`;
  return useAnswer<T>(key, (signal) => {
    const { revision: _, ...asked } = params ?? {}; // only makes the key change when the run has grown
    return askJson<T>(question, asked, signal);
  });
}

export interface Runs {
  runs: RunLine[] | null;
  comparison: boolean;
  error: string | null;
}

const OFTEN = 1000;
const SELDOM = 5000;

export function useRuns(): Runs {
  const [state, setState] = useState<Runs>({ runs: null, comparison: false, error: null });
  useEffect(() => {
    let timer = 0;
    let over = false;
    const look = async () => {
      let pause = SELDOM;
      try {
        const found = await askJson<{ runs: RunLine[]; comparison: boolean }>("runs");
        if (over) return;
        setState((old) => {
          const same = JSON.stringify(old.runs) === JSON.stringify(found.runs) && old.error === null;
          return same ? old : { runs: found.runs, comparison: found.comparison, error: null };
        });
        if (found.runs.some((run) => run.status === "recording")) pause = OFTEN;
      } catch (error) {
        if (over) return;
        setState((old) => ({ ...old, error: error instanceof Error ? error.message : String(error) }));
      }
      if (live && !over) timer = window.setTimeout(look, document.hidden ? SELDOM : pause);
    };
    void look();
    return () => {
      over = true;
      window.clearTimeout(timer);
    };
  }, []);
  return state;
}

export const useAbout = (run: RunLine | undefined): Answer<About> =>
  useJson<About>("about", run ? { run: run.id, revision: run.revision } : null);

// Findings read the whole run: they wait until the first picture is there, so as not to delay it.
let tellShown: () => void = () => undefined;
const shown = new Promise<void>((tell) => { tellShown = tell; });
export const pictureShown = (): void => tellShown();

export function useFindings(run: RunLine | undefined): Answer<Findings> {
  return useAnswer<Findings>(run ? JSON.stringify([run.id, run.revision]) : null, async (signal) => {
    await Promise.race([shown, new Promise((go) => setTimeout(go, 4000))]);
    return askJson<Findings>("findings", { run: run?.id }, signal);
  });
}

export const statisticsOf = (about: About, siteName: string): string[] => {
  const site = about.sites.find((s) => s.name === siteName);
  return site ? about.statistics[site.statistics] ?? [] : [];
};
