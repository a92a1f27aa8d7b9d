// Runs as points: any column of the table against any other.

import { strokeOf } from "../colour";
import { plural, show } from "../numbers";
import { adjust, go } from "../route";
import { csv } from "../take/save";
import { Take } from "../take/menu";
import { useDark } from "../theme";
import type { RunLine } from "../types";
import { axisOf, columnAxis, type Axis } from "./axis";
import { groupsOf, shownColumns, varied } from "./columns";
import { fact } from "./filter";

const WIDTH = 900;
const HEIGHT = 440;
const LEFT = 86;
const BOTTOM = 46;
const LANE = 26; // above the plot, for NaN

export const keysOf = (runs: RunLine[]): string[] => shownColumns(runs, ["last", "best", "min", "max"], "").map((c) => c.key).filter((k) => !["name", "status", "created"].includes(k));
export const usualResult = (runs: RunLine[], keys: string[]): string =>
  keys.find((k) => /^best:.*(val|eval|test)/.test(k)) ?? keys.find((k) => k.startsWith("best:")) ?? (runs.some((r) => r.loss) ? "loss" : keys[0] ?? "steps");

export const ColumnPicker = ({ label, name, keys, value }: { label: string; name: string; keys: string[]; value: string }) => (
  <label>{label}
    <select aria-label={label} value={value} onChange={(e) => adjust({ [name]: e.currentTarget.value })}>
      {keys.map((k) => <option key={k} value={k}>{k === "loss" ? "last loss" : k.replace(":", " ")}</option>)}
    </select>
  </label>
);

export function ScatterView({ runs, group, params }: { runs: RunLine[]; group: string; params: Record<string, string> }) {
  const keys = keysOf(runs);
  const x = keys.includes(params["sx"] ?? "") ? params["sx"] ?? "" : varied(runs)[0] ?? "steps";
  const y = keys.includes(params["sy"] ?? "") ? params["sy"] ?? "" : usualResult(runs, keys);
  return (
    <div class="sweep">
      <div class="tools">
        <ColumnPicker label="Across" name="sx" keys={keys} value={x} />
        <ColumnPicker label="Up" name="sy" keys={keys} value={y} />
        <span class="space" />
        <Take name={`${x}-${y}`} csv={() => csv(["run", x, y], runs.map((r) => [r.name, text(fact(r, x)), text(fact(r, y))]))} />
      </div>
      <Scatter runs={runs} group={group} xName={x.replace(":", " ")} yName={y === "loss" ? "last loss" : y.replace(":", " ")} x={columnAxis(runs, x)} y={columnAxis(runs, y)} told={(run) => `${run.name}: ${x} ${text(fact(run, x)) ?? "–"}, ${y} ${text(fact(run, y)) ?? "–"}`} value={(run) => fact(run, y)} />
    </div>
  );
}

const text = (value: unknown): string | number | null => (value === null || value === undefined ? null : typeof value === "number" ? value : String(value));

interface Props { runs: RunLine[]; group: string; xName: string; yName: string; x: Axis; y: Axis; told: (run: RunLine) => string; value: (run: RunLine) => unknown }

export function Scatter({ runs, group, xName, yName, x, y, told, value }: Props) {
  const dark = useDark();
  const groups = group ? groupsOf(runs, group) : [["", runs] as [string, RunLine[]]];
  const px = (at: number) => LEFT + 12 + at * (WIDTH - LEFT - 30);
  const py = (at: number) => HEIGHT - BOTTOM - 10 - at * (HEIGHT - BOTTOM - LANE - 24);
  const there = runs.filter((r) => x.has(r) && y.has(r));
  const lost = there.filter((r) => Number.isNaN(y.place(r)));
  return (
    <figure class="panel">
      <svg class="scatter" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${yName} against ${xName}, ${plural(there.length, "run")}`}>
        {x.ticks.map((t) => <g key={t.text}><line class="gridline" x1={px(t.at)} x2={px(t.at)} y1={LANE} y2={HEIGHT - BOTTOM} /><text x={px(t.at)} y={HEIGHT - BOTTOM + 15} text-anchor="middle">{t.text}</text></g>)}
        {y.ticks.map((t) => <g key={t.text}><line class="gridline" x1={LEFT} x2={WIDTH - 10} y1={py(t.at)} y2={py(t.at)} /><text x={LEFT - 8} y={py(t.at) + 4} text-anchor="end">{t.text}</text></g>)}
        <text class="axisname" x={(LEFT + WIDTH) / 2} y={HEIGHT - 8} text-anchor="middle">{xName}{x.log ? " (log)" : ""}</text>
        <text class="axisname" transform={`translate(16 ${HEIGHT / 2}) rotate(-90)`} text-anchor="middle">{yName}{y.log ? " (log)" : ""}</text>
        {lost.length > 0 && <><rect class="nanlane" x={LEFT} y={2} width={WIDTH - LEFT - 10} height={LANE - 6} /><text class="bad" x={LEFT - 8} y={16} text-anchor="end">NaN or inf</text></>}
        {groups.map(([name, own], g) => own.filter((r) => x.has(r) && y.has(r) && !Number.isNaN(x.place(r))).map((r) => {
          const at = y.place(r);
          const up = Number.isNaN(at) ? LANE / 2 : py(at);
          return <circle key={r.name} class="dot" data-run={r.name} data-value={String(value(r))} cx={px(x.place(r))} cy={up} r={5} style={{ fill: strokeOf(g, dark).colour, ...(g >= 8 ? { fillOpacity: 0.15, stroke: strokeOf(g, dark).colour, strokeWidth: 2 } : {}) }} onClick={() => go("map", { run: r.name })}><title>{told(r)}{name && `, ${group} ${name}`}</title></circle>;
        }))}
      </svg>
      <figcaption class="note">
        {group && groups.map(([name], g) => <span key={name} class="key"><i style={{ background: strokeOf(g, dark).colour }} />{group} {name}</span>)}
        {runs.length > there.length && <span>{plural(runs.length - there.length, "run")} without {yName} or {xName}</span>}
      </figcaption>
    </figure>
  );
}

export const valueAxis = (runs: RunLine[], values: Map<string, number | null>): Axis => axisOf(runs, (run) => values.get(run.name) ?? null);
export const shownValue = (value: number | null | undefined): string => (value === null || value === undefined ? "not recorded" : show(value));
