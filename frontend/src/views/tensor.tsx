// Recorded tensors of a site: choose the step, the two axes of the picture and where the others stand.

import { useEffect, useRef, useState } from "preact/hooks";
import { askPacked } from "../api";
import { gradient } from "../colour";
import { useAnswer, useJson } from "../data";
import { grouped, show } from "../numbers";
import { coloursFor, Picture, type SliceFacts } from "../picture";
import { adjust } from "../route";
import { useDark } from "../theme";
import type { RunLine, TensorGroup } from "../types";

const MOST_AXES = 16;

export function StepSlider({ steps, step, choose }: { steps: number[]; step: number; choose: (step: number) => void }) {
  const position = Math.max(0, steps.indexOf(step));
  if (steps.length < 2) return <label>step <output>{grouped(step)}</output></label>;
  return (
    <label>step
      <input type="range" aria-label="Step" min={0} max={steps.length - 1} value={position} onInput={(e) => choose(steps[Number(e.currentTarget.value)] ?? step)} />
      <output>{grouped(step)}</output>
    </label>
  );
}

// The recorded step that is nearest to the wanted one.
export const nearest = (steps: number[], wanted: number | null): number =>
  wanted === null ? steps[steps.length - 1] ?? 0 : steps.reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best), steps[0] ?? 0);

export function TensorPanel({ run, site, params }: { run: RunLine; site: string; params: Record<string, string> }) {
  const dark = useDark();
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(700);
  const [said, setSaid] = useState<string | null>(null);
  const listed = useJson<{ tensors: TensorGroup[] }>("tensors", { run: run.id, site, revision: run.revision });
  const groups = (listed.value?.tensors ?? []).filter((g) => !/histogram/i.test(g.reduction));
  const group = groups.find((g) => g.field === params["field"]) ?? groups.find((g) => g.field === "value") ?? groups[0];
  const shape = group?.shape ?? [];
  const drawable = group !== undefined && shape.length <= MOST_AXES;
  const axes = shape.length < 2 ? 2 : shape.length;
  const down = clamp(params["down"], axes, axes - 2);
  const across = clamp(params["across"], axes, axes - 1);
  const step = group ? nearest(group.steps, params["step"] ? Number(params["step"]) : null) : 0;
  const index = shape.map((length, axis) => Math.min(Math.max(0, Number(params["index"]?.split(",")[axis]) || 0), Math.max(0, length - 1)));
  const asked = { run: run.id, site, step, field: group?.field, down, across, index: shape.length > 2 ? index.join(",") : null };
  const slice = useAnswer(drawable && down !== across ? JSON.stringify(asked) : null, (signal) => askPacked<SliceFacts>("slice", asked, signal));

  useEffect(() => {
    if (!box.current) return;
    const watcher = new ResizeObserver(() => box.current && setWidth(box.current.clientWidth));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [group === undefined]);

  if (!group) return null;
  const setIndex = (axis: number, value: number) => adjust({ index: index.map((old, a) => (a === axis ? value : old)).join(",") });
  const colours = slice.value && coloursFor(slice.value, dark);
  return (
    <div class="panel tensor" ref={box}>
      <h2>Recorded tensor <span class="quiet mono">[{shape.join(" × ")}] {group.dtype.replace("torch.", "")}</span></h2>
      <div class="tools">
        {groups.length > 1 && (
          <label>field
            <select value={group.field} onChange={(e) => adjust({ field: e.currentTarget.value, down: null, across: null, index: null })}>
              {groups.map((g) => <option key={g.field} value={g.field}>{g.field}</option>)}
            </select>
          </label>
        )}
        <StepSlider steps={group.steps} step={step} choose={(s) => adjust({ step: s })} />
        {shape.length > 2 && drawable && (
          <>
            <AxisChoice word="down" axis={down} shape={shape} choose={(a) => adjust(a === across ? { down: a, across: down } : { down: a })} />
            <AxisChoice word="across" axis={across} shape={shape} choose={(a) => adjust(a === down ? { across: a, down: across } : { across: a })} />
            {shape.map((length, axis) => axis !== down && axis !== across && length > 1 && (
              <label key={axis}>axis {axis}
                <input type="range" aria-label={`Index of axis ${axis}`} min={0} max={length - 1} value={index[axis]} onInput={(e) => setIndex(axis, Number(e.currentTarget.value))} />
                <output>{index[axis]}</output>
              </label>
            ))}
          </>
        )}
      </div>
      {!drawable && <p class="quiet">A tensor of so many axes cannot be drawn.</p>}
      {slice.error && <p class="alarm">{slice.error}</p>}
      {slice.value && colours && (
        <>
          <Picture
            slice={slice.value} width={width - 24} height={460} said={setSaid}
            describe={(row, column) => {
              if (shape.length === 0) return "value";
              if (shape.length === 1) return `[${column}]`;
              return `[${index.map((at, axis) => (axis === down ? row : axis === across ? column : at)).join(", ")}]`;
            }}
          />
          <div class="under">
            <span class="ramp" style={{ background: gradient(colours.lut) }} /> {show(colours.low)} to {show(colours.high)}
            {slice.value.facts.nans + slice.value.facts.infs > 0 && <span class="key"><i class="broken" />{grouped(slice.value.facts.nans)} NaN, {grouped(slice.value.facts.infs)} inf</span>}
            <output class="value" data-testid="value">{said ?? (slice.value.facts.exact ? "point at a cell for its value" : "each cell shows the value furthest from the middle")}</output>
          </div>
        </>
      )}
    </div>
  );
}

function clamp(text: string | undefined, axes: number, usual: number): number {
  const axis = text === undefined ? usual : Number(text);
  return Number.isInteger(axis) && axis >= 0 && axis < axes ? axis : usual;
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
