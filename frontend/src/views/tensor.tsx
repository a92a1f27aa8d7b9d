// Recorded tensors of a site: choose the step, the two axes of the picture and where the others stand.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { askPacked, live } from "../api";
import { gradient } from "../colour";
import { useAnswer, useJson } from "../data";
import { grouped, show } from "../numbers";
import { coloursFor, Picture, type Slice, type SliceFacts } from "../picture";
import { adjust, whole } from "../route";
import { useDark } from "../theme";
import { Thumb } from "../thumb";
import type { RunLine, TensorGroup } from "../types";
import { nearest, StepSlider } from "./steps";

const MOST_AXES = 16;

export function TensorPanel({ run, runs, site, params }: { run: RunLine; runs: RunLine[]; site: string; params: Record<string, string> }) {
  const dark = useDark();
  const phase = params["phase"];
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(700);
  const [said, setSaid] = useState<string | null>(null);
  const listed = useJson<{ tensors: TensorGroup[] }>("tensors", { run: run.name, phase, site, revision: run.revision });
  const groups = (listed.value?.tensors ?? []).filter((g) => !/histogram/i.test(g.reduction));
  const group = groups.find((g) => g.field === params["field"]) ?? groups.find((g) => g.field === "value") ?? groups[0];
  const shape = group?.shape ?? [];
  const drawable = group !== undefined && shape.length <= MOST_AXES;
  const axes = shape.length < 2 ? 2 : shape.length;
  const down = clamp(params["down"], axes, axes - 2);
  const across = clamp(params["across"], axes, axes - 1);
  const step = group ? nearest(group.steps, whole(params["step"])) : 0;
  const index = shape.map((length, axis) => Math.min(Math.max(0, Number(params["index"]?.split(",")[axis]) || 0), Math.max(0, length - 1)));
  const grid = shape.length > 2 ? gridAxis(params["grid"], shape, down, across) : null;
  const minusStep = group ? whole(params["minusStep"]) : null;
  const minusRun = runs.find((r) => r.name === params["minusRun"])?.name;
  const minus = live && (minusStep !== null || minusRun !== undefined);
  const asked = {
    run: run.name, phase, site, step, field: group?.field, down, across, index: shape.length > 2 ? index.join(",") : null, stack: grid,
    size: grid === null ? null : 96, minusStep: minus ? minusStep ?? step : null, minusRun: minus ? minusRun : null,
  };
  const slice = useAnswer(drawable && down !== across ? JSON.stringify(asked) : null, (signal) => askPacked<SliceFacts>("slice", asked, signal), `${run.name} ${site}`);
  const fixed = params["tensorColours"] !== "step";
  const span = useJson<{ least: number | null; greatest: number | null }>("span", group && fixed && !minus ? { run: run.name, phase, site, field: group.field, revision: run.revision } : null);

  useEffect(() => {
    if (!box.current) return;
    const watcher = new ResizeObserver(() => box.current && setWidth(box.current.clientWidth));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [group === undefined]);

  const ends = useMemo((): [number, number] | null => {
    const { least, greatest } = span.value ?? {};
    return fixed && typeof least === "number" && typeof greatest === "number" ? [least, greatest] : null;
  }, [span.value, fixed]);
  const colours = useMemo(() => slice.value && coloursFor(slice.value, dark, minus ? null : ends), [slice.value, dark, ends, minus]);
  if (!group) return null;
  const large = params["large"] === "yes";
  const setIndex = (axis: number, value: number) => adjust({ index: index.map((old, a) => (a === axis ? value : old)).join(",") });
  return (
    <div class="panel tensor" ref={box}>
      <h2>Recorded tensor <span class="quiet mono">[{shape.join(" × ")}] {group.dtype.replace("torch.", "")}</span></h2>
      <div class="tools">
        {groups.length > 1 && (
          <label>field
            <select aria-label="Field" value={group.field} onChange={(e) => adjust({ field: e.currentTarget.value, down: null, across: null, index: null })}>
              {groups.map((g) => <option key={g.field} value={g.field}>{g.field}</option>)}
            </select>
          </label>
        )}
        <StepSlider steps={group.steps} step={step} ready={!slice.busy} choose={(s) => adjust({ step: s })} />
        {shape.length > 2 && drawable && (
          <>
            <AxisChoice word="down" axis={down} shape={shape} choose={(a) => adjust(a === across ? { down: a, across: down } : { down: a })} />
            <AxisChoice word="across" axis={across} shape={shape} choose={(a) => adjust(a === down ? { across: a, down: across } : { across: a })} />
            {shape.map((length, axis) => axis !== down && axis !== across && axis !== grid && length > 1 && (
              <label key={axis}>axis {axis}
                <input type="range" aria-label={`Index of axis ${axis}`} min={0} max={length - 1} value={index[axis]} onInput={(e) => setIndex(axis, Number(e.currentTarget.value))} />
                <output>{index[axis]}</output>
              </label>
            ))}
            {live && (
              <label>side by side
                <select aria-label="Side by side" value={grid ?? ""} onChange={(e) => adjust({ grid: e.currentTarget.value || null })}>
                  <option value="">one</option>
                  {shape.map((length, a) => a !== down && a !== across && <option key={a} value={a}>axis {a} ({length})</option>)}
                </select>
              </label>
            )}
          </>
        )}
        {live && (
          <label>minus
            <select aria-label="Minus" value={minusRun ?? (minusStep !== null ? `step ${minusStep}` : "")} onChange={(e) => {
              const chosen = e.currentTarget.value;
              adjust(chosen.startsWith("step ") ? { minusStep: Number(chosen.slice(5)), minusRun: null } : { minusStep: null, minusRun: chosen || null });
            }}>
              <option value="">nothing</option>
              {group.steps.slice(0, 200).map((s) => <option key={s} value={`step ${s}`}>step {s}</option>)}
              {runs.filter((r) => r.name !== run.name).slice(0, 50).map((r) => <option key={r.name} value={r.name}>{r.name}, same step</option>)}
            </select>
          </label>
        )}
        <div class="switch" role="group" aria-label="Colours of">
          <button aria-pressed={fixed} onClick={() => adjust({ tensorColours: null })} title="The same colours at every step">all steps</button>
          <button aria-pressed={!fixed} onClick={() => adjust({ tensorColours: "step" })}>this step</button>
        </div>
        <button class="chip" aria-pressed={large} onClick={() => adjust({ large: large ? null : "yes" })}>larger</button>
      </div>
      {!drawable && <p class="quiet">A tensor of so many axes cannot be drawn.</p>}
      {slice.error && <p class="alarm">{slice.error}</p>}
      {slice.value && colours && (
        <>
          {grid !== null
            ? <Filters slice={slice.value} colours={colours} large={large} open={(i) => adjust({ grid: null, index: index.map((old, a) => (a === grid ? i : old)).join(",") })} />
            : <Picture
                slice={slice.value} width={width - 24} height={large ? 960 : 460} said={setSaid} colours={colours} name={`${run.name}-${site}-step${step}`}
                describe={(row, column) => {
                  if (shape.length === 0) return "value";
                  if (shape.length === 1) return `[${column}]`;
                  return `[${index.map((at, axis) => (axis === down ? row : axis === across ? column : at)).join(", ")}]`;
                }}
              />}
          <div class="under">
            <span class="ramp" style={{ background: gradient(colours.lut) }} /> {show(colours.low)} to {show(colours.high)}{minus && " (difference)"}
            {slice.value.facts.nans + slice.value.facts.infs > 0 && <span class="key"><i class="broken" />{grouped(slice.value.facts.nans)} NaN, {grouped(slice.value.facts.infs)} inf</span>}
            <output class="value" data-testid="value">{said ?? (slice.value.facts.exact ? "point at a cell for its value" : "each cell shows the value furthest from the middle")}</output>
          </div>
        </>
      )}
    </div>
  );
}

function Filters({ slice, colours, large, open }: { slice: Slice; colours: ReturnType<typeof coloursFor>; large: boolean; open: (index: number) => void }) {
  return (
    <div class={`filters ${large ? "large" : ""}`} data-testid="filters">
      {Array.from({ length: slice.facts.pictures }, (_, i) => (
        <button key={i} onClick={() => open(i)} aria-label={`Open ${i}`}><Thumb slice={slice} picture={i} colours={colours} size={large ? 192 : 96} /><span>{i}</span></button>
      ))}
    </div>
  );
}

function clamp(text: string | undefined, axes: number, usual: number): number {
  const axis = text === undefined ? usual : Number(text);
  return Number.isInteger(axis) && axis >= 0 && axis < axes ? axis : usual;
}

function gridAxis(text: string | undefined, shape: number[], down: number, across: number): number | null {
  const axis = whole(text);
  return axis !== null && axis >= 0 && axis < shape.length && axis !== down && axis !== across ? axis : null;
}

function AxisChoice({ word, axis, shape, choose }: { word: string; axis: number; shape: number[]; choose: (axis: number) => void }) {
  return (
    <label>{word}
      <select aria-label={`Axis ${word}`} value={axis} onChange={(e) => choose(Number(e.currentTarget.value))}>
        {shape.map((length, a) => <option key={a} value={a}>axis {a} ({length})</option>)}
      </select>
    </label>
  );
}
