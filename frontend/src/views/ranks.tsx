// One site as every rank saw it: a line for each of a few ranks, a map of many.

import { useMemo } from "preact/hooks";
import { askPacked } from "../api";
import { Chart, type Line } from "../chart";
import { useAnswer } from "../data";
import { paintSlice, type Slice } from "../picture";
import { sequential, strokeOf } from "../colour";
import { grouped } from "../numbers";
import { labels } from "./ranksview";
import { useDark } from "../theme";
import type { RunLine } from "../types";
import { statisticWord } from "../words";

interface RankFacts { ranks: number[]; total: number }
const MOST_LINES = 8;

export function RanksPanel({ run, site, statistic }: { run: RunLine; site: string; statistic: string }) {
  const dark = useDark();
  const answer = useAnswer(JSON.stringify([run.name, run.revision, site, statistic]), (signal) => askPacked<RankFacts>("ranks", { run: run.name, site, statistic }, signal), `${run.name} ${site}`);
  const packed = answer.value;
  const drawn = useMemo(() => {
    const steps = packed?.arrays["steps"];
    const high = packed?.arrays["high"];
    if (!packed || !steps || !high) return null;
    const columns = steps.length;
    const [there, bad] = [packed.arrays["there"], packed.arrays["bad"]];
    const shown = Float64Array.from(high, (v, i) => (bad?.[i] ? NaN : v));
    const lines = packed.facts.ranks.map((rank, row): Line => ({ label: `rank ${rank}`, ...strokeOf(row, dark), values: shown.slice(row * columns, (row + 1) * columns), there: there?.slice(row * columns, (row + 1) * columns) }));
    return { steps, lines, shown, there, columns };
  }, [packed, dark]);
  if (!drawn || !packed) return null;
  const many = drawn.lines.length > MOST_LINES;
  const [from, to] = [drawn.steps[0] ?? 0, drawn.steps[drawn.columns - 1] ?? 0];
  return (
    <div class="panel" data-testid="ranks">
      <h2>By rank <span class="quiet">{statisticWord(statistic)}{many ? ": ranks down, steps across" : ""}</span></h2>
      {many ? (
        <div class="labelled">
          <div class="rows narrow" aria-hidden="true">{labels(packed.facts.ranks.length, 12).map((i) => <span key={i} style={{ top: `${((i + 0.5) / packed.facts.ranks.length) * 100}%` }}>rank {packed.facts.ranks[i]}</span>)}</div>
          <RankMap values={drawn.shown} there={drawn.there} rows={drawn.lines.length} columns={drawn.columns} />
          <div class="columns ends" aria-hidden="true"><span>step {grouped(from)}</span><span>{grouped(to)}</span></div>
        </div>
      ) : <Chart name={`${site}-ranks`} steps={drawn.steps} lines={drawn.lines} height={200} yName={statisticWord(statistic)} />}
    </div>
  );
}

function RankMap({ values, there, rows, columns }: { values: ArrayLike<number>; there: ArrayLike<number> | undefined; rows: number; columns: number }) {
  const picture = useMemo(() => {
    let [low, high] = [Infinity, -Infinity];
    for (const value of Array.from(values).filter(Number.isFinite)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    const slice = { facts: { cellRows: rows, cellColumns: columns }, arrays: { low: Float64Array.from(values), there }, shapes: {} } as unknown as Slice;
    return paintSlice(slice, 0, { lut: sequential, low, high: high > low ? high : low + 1 });
  }, [values]);
  return <img class="rankmap" src={picture.toDataURL()} alt={`${rows} ranks over ${columns} steps`} />;
}
