// What looks wrong, and what was expected and did not come; each with a way to the place.

import type { ViewProps } from "../app";
import { useJson } from "../data";
import { grouped, plural, show } from "../numbers";
import { href } from "../route";
import { Spark } from "../runs/spark";
import type { Finding } from "../types";
import { findingWord, siteWord } from "../words";
import { CoveragePanel, type CoverageAnswer } from "./coverage";

const STATISTIC_FOR: Record<string, string> = {
  nonfinite: "nans", dead: "zeros", constant: "std", saturated: "rms", exploding: "rms", vanishing: "rms", "no-gradient": "absmax",
  "zero-gradient": "absmax", "dead-units": "dead_share", "lost-updates": "zeros", "step-too-large": "ratio", "step-too-small": "ratio", underflow: "zeros",
};

export function FindingsView({ run, about, findings, busy }: ViewProps & { busy: boolean }) {
  const coverage = useJson<CoverageAnswer>("coverage", { run: run.name, revision: run.revision });
  const kindOf = (site: string) => about.sites.find((s) => s.name === site)?.kind ?? "";
  const mapOf = (f: Finding) => href("map", { run: run.name, kind: kindOf(f.site), statistic: Object.hasOwn(STATISTIC_FOR, f.kind) ? STATISTIC_FOR[f.kind] : null });
  return (
    <section class="findings" aria-label="Findings">
      <h1>Findings</h1>
      {findings.findings.length === 0 && (busy ? <p class="quiet">Looking …</p>
        : findings.verdict === "healthy" ? <p class="good">Nothing looks wrong in {plural(run.steps, "step")} of {plural(run.sites, "site")}.</p>
        : <p>Not judged: too little was recorded to call this training healthy.</p>)}
      {findings.summary && <p class="note">{findings.summary}</p>}
      {findings.findings.map((f) => (
        <article key={f.kind + f.site} class={`finding ${f.severity}`}>
          <h2>{findingWord(f.kind)}{f.step !== null && <span class="quiet"> from step {grouped(f.step)}</span>}</h2>
          <p>{f.message}.</p>
          {f.evidence.length > 0 && (
            <ul class="evidence" aria-label="Evidence">
              {f.evidence.map((e) => (
                <li key={e.name + e.site}>
                  {e.points.length > 1 && <Spark values={e.points} broken={false} />}
                  {e.name}: <b>{show(e.value)}</b>
                  {e.step !== null && <span class="quiet"> at step {grouped(e.step)}</span>}
                </li>
              ))}
            </ul>
          )}
          {f.causes.length > 0 && <p class="quiet">Perhaps: {f.causes.join("; or ")}.</p>}
          <p><code>{f.advice}</code></p>
          <p class="links">
            <a href={mapOf(f)}>show on the map</a>
            <a href={href("site", { run: run.name, site: f.site, step: f.step })}>open {siteWord(f.site)}</a>
          </p>
          {f.total > 1 && (
            <details>
              <summary>all {f.total} sites</summary>
              <ul>{f.sites.map((s) => <li key={s}><a href={href("site", { run: run.name, site: s })}>{siteWord(s)}</a></li>)}{f.total > f.sites.length && <li class="quiet">and {f.total - f.sites.length} more</li>}</ul>
            </details>
          )}
        </article>
      ))}
      <h1>Coverage</h1>
      {coverage.error && <p class="alarm">{coverage.error}</p>}
      {coverage.value && <CoveragePanel answer={coverage.value} run={run} about={about} />}
    </section>
  );
}
