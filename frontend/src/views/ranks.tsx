// One site as every rank saw it: a line for each of a few ranks, a map of many.

import { useMemo } from "preact/hooks";
import { askPacked } from "../api";
import { Chart, type Line } from "../chart";
import { lines as lineColours } from "../colour";
import { useAnswer } from "../data";
import { paintSlice, type Slice } from "../picture";
import { sequential } from "../colour";
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
    const colours = lineColours(dark);
    const columns = steps.length;
    const lines = packed.facts.ranks.map((rank, row): Line => ({ label: `rank ${rank}`, colour: colours[row % colours.length] ?? "", values: high.slice(row * columns, (row + 1) * columns) }));
    return { steps, lines, high, columns };
  }, [packed, dark]);
  if (!drawn || !packed) return null;
  const many = drawn.lines.length > MOST_LINES;
  return (
    <div class="panel" data-testid="ranks">
      <h2>By rank <span class="quiet">{statisticWord(statistic)}{many ? ": ranks down, steps across" : ""}</span></h2>
      {many ? <RankMap values={drawn.high} rows={drawn.lines.length} columns={drawn.columns} /> : <Chart name={`${site}-ranks`} steps={drawn.steps} lines={drawn.lines} height={180} />}
    </div>
  );
}

function RankMap({ values, rows, columns }: { values: ArrayLike<number>; rows: number; columns: number }) {
  const picture = useMemo(() => {
    let [low, high] = [Infinity, -Infinity];
    for (const value of Array.from(values).filter(Number.isFinite)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    const slice = { facts: { cellRows: rows, cellColumns: columns }, arrays: { low: Float64Array.from(values) }, shapes: {} } as unknown as Slice;
    return paintSlice(slice, 0, { lut: sequential, low, high: high > low ? high : low + 1 });
  }, [values]);
  return <img class="rankmap" src={picture.toDataURL()} alt={`${rows} ranks over ${columns} steps`} />;
}
