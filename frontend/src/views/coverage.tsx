// Expected values that were not recorded, by reason; values that were lost or damaged.

import { grouped, plural } from "../numbers";
import { href } from "../route";
import type { About, RunLine } from "../types";

export interface CoverageAnswer {
  planned: number;
  missing: { site: string; reason: string }[];
  problems: string[];
  lost: string[];
}

const SHOWN = 400;

export function CoveragePanel({ answer, run, about }: { answer: CoverageAnswer; run: RunLine; about: About }) {
  const { planned, missing, problems, lost } = answer;
  const known = new Set(about.sites.map((s) => s.name));
  const reasons = new Map<string, string[]>();
  for (const { site, reason } of missing) {
    const said = plainReason(reason);
    const listed = reasons.get(said);
    if (listed) listed.push(site);
    else reasons.set(said, [site]);
  }
  const came = Math.max(0, planned - missing.length);
  return (
    <>
      {planned === 0 && <p class="quiet">This run has no plan: which values were expected is not known.</p>}
      {planned > 0 && (
        <p>
          <span class="meter"><i style={{ width: `${(100 * came) / planned}%` }} /></span>
          {missing.length === 0
            ? <span class="good">Every value that the plan names was recorded ({plural(planned, "place")}).</span>
            : <>{grouped(came)} of {plural(planned, "place")} that the plan names have values.</>}
        </p>
      )}
      {[...reasons].map(([reason, sites]) => (
        <details key={reason} class="panel" open={sites.length <= 12}>
          <summary><b>{plural(sites.length, "site")}</b> {reason}</summary>
          <ul class="columns">
            {sites.slice(0, SHOWN).map((s) => <li key={s}>{known.has(s) ? <a href={href("site", { run: run.name, site: s })}>{s}</a> : s}</li>)}
            {sites.length > SHOWN && <li class="quiet">and {grouped(sites.length - SHOWN)} more</li>}
          </ul>
        </details>
      ))}
      {[...problems, ...lost].length > 0 && (
        <div class="panel">
          <h2>Lost or damaged</h2>
          <ul>{[...problems, ...lost].map((text, i) => <li key={i}>{text}</li>)}</ul>
        </div>
      )}
    </>
  );
}

// A container that only holds modules is nothing that went wrong.
const plainReason = (reason: string): string => (/has no forward|holds modules and is not called/.test(reason) ? `never called: ${reason}` : reason);
