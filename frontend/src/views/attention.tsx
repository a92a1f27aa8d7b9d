// Attention maps: one layer at a time, all heads small, one head large and over time, how spread each head is.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { askPacked } from "../api";
import type { ViewProps } from "../app";
import { Chart } from "../chart";
import { gradient, lines as lineColours } from "../colour";
import { useAnswer, useJson } from "../data";
import { show } from "../numbers";
import { coloursFor, Picture, type Colours, type Slice, type SliceFacts } from "../picture";
import { adjust, whole } from "../route";
import { useDark } from "../theme";
import { Thumb } from "../thumb";
import type { RunLine, TensorGroup } from "../types";
import { nearest, StepSlider } from "./steps";

const OVER_TIME = 8;

export function AttentionView({ run, about, params }: ViewProps) {
  const dark = useDark();
  const box = useRef<HTMLDivElement>(null);
  const [size, setSize] = useState({ width: 600, height: 500 });
  const [said, setSaid] = useState<string | null>(null);
  const layers = useMemo(() => about.sites.filter((s) => s.kind === "attention" && (about.tensors[s.name] ?? []).includes("tensor")), [about]);
  const site = layers.find((s) => s.name === params["site"]) ?? layers[0];
  const listed = useJson<{ tensors: TensorGroup[] }>("tensors", site ? { run: run.name, phase: params["phase"], site: site.name, revision: run.revision } : null);
  const group = listed.value?.tensors.find((g) => g.field === "value") ?? listed.value?.tensors[0];
  const shape = group?.shape ?? [];
  const step = group ? nearest(group.steps, whole(params["step"])) : 0;
  const heads = shape.length >= 3 ? shape[shape.length - 3] ?? 1 : 1;
  const examples = shape.length >= 4 ? shape[shape.length - 4] ?? 1 : 1;
  const head = Math.min(Number(params["head"]) || 0, heads - 1);
  const example = Math.min(Number(params["example"]) || 0, examples - 1);
  const stack = shape.length >= 3 ? shape.length - 3 : null;
  const index = shape.length >= 4 ? shape.map((_, axis) => (axis === shape.length - 4 ? example : 0)).join(",") : null;
  const asked = { run: run.name, phase: params["phase"], site: site?.name, step, field: group?.field, stack, index, size: 256 };
  const slice = useAnswer(group && site && shape.length >= 2 ? JSON.stringify(asked) : null, (signal) => askPacked<SliceFacts>("slice", asked, signal), `${run.name} ${site?.name}`);
  const told = useJson<{ tokens: string[] | null }>("tokens", group ? { run: run.name, step } : null);
  const tokens = told.value?.tokens ?? null;

  useEffect(() => {
    if (!box.current) return;
    const watcher = new ResizeObserver(() => box.current && setSize({ width: box.current.clientWidth, height: box.current.clientHeight }));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [slice.value === null, told.value === null && told.error === null]);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea, canvas, dialog, details")) return;
      const position = layers.findIndex((s) => s.name === site?.name);
      if (event.key === "ArrowRight") adjust({ head: (head + 1) % heads });
      if (event.key === "ArrowLeft") adjust({ head: (head + heads - 1) % heads });
      const next = event.key === "ArrowDown" ? layers[position + 1] : event.key === "ArrowUp" ? layers[position - 1] : undefined;
      if (next) adjust({ site: next.name });
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  const colours = useMemo(() => slice.value && weights(slice.value, dark), [slice.value, dark]);
  if (!site) {
    return (
      <section class="attention" aria-label="Attention"><p class="quiet">
        This run holds no attention maps. Record them with <code>tt.tap("*:attention", keep=tt.Full())</code>.
      </p></section>
    );
  }
  const labels = tokens && slice.value && tokens.length >= slice.value.facts.columns ? tokens : null;
  return (
    <section class="attention" aria-label="Attention">
      <div class="tools">
        <label>Layer
          <select aria-label="Layer" value={site.name} onChange={(e) => adjust({ site: e.currentTarget.value })}>
            {layers.map((s) => <option key={s.name} value={s.name}>{s.name.replace(/:attention$/, "")}</option>)}
          </select>
        </label>
        {group && <StepSlider steps={group.steps} step={step} ready={!slice.busy} choose={(s) => adjust({ step: s })} />}
        {examples > 1 && (
          <label>example
            <input type="range" aria-label="Example" min={0} max={examples - 1} value={example} onInput={(e) => adjust({ example: e.currentTarget.value })} />
            <output>{example}</output>
          </label>
        )}
        <span class="space" />
        {colours && <span class="under"><span class="ramp" style={{ background: gradient(colours.lut) }} /> {show(colours.low)} to {show(colours.high)}, small weights stretched</span>}
      </div>
      {slice.error && <p class="alarm">{slice.error}</p>}
      {slice.value && colours && (told.value || told.error) && (
        <div class="two">
          <div class="heads" role="group" aria-label="Heads">
            {Array.from({ length: slice.value.facts.pictures }, (_, h) => (
              <button key={h} aria-pressed={h === head} class={h === head ? "on" : ""} onClick={() => adjust({ head: h })}>
                <Thumb slice={slice.value as Slice} picture={h} colours={colours} />
                <span>head {h}</span>
              </button>
            ))}
          </div>
          <div class="large" ref={box}>
            <p class="said"><b>head {head}</b> <output data-testid="value">{said ?? "rows look at columns: point at a cell"}</output></p>
            <Picture
              slice={slice.value} picture={Math.min(head, slice.value.facts.pictures - 1)} colours={colours} width={size.width - 8} height={Math.max(320, size.height - 40)} rowLabels={labels} columnLabels={labels} said={setSaid}
              name={`${run.name}-${site.name}-head${head}-step${step}`}
              describe={(row, column) => (labels ? `“${labels[row]}” looks at “${labels[column]}”` : `position ${row} looks at ${column}`)}
            />
          </div>
          <aside class="overtime">
            {group && group.steps.length > 1 && <OverTime run={run} asked={asked} steps={group.steps} step={step} head={head} dark={dark} />}
            <Entropy run={run} site={site.name} head={head} />
          </aside>
        </div>
      )}
    </section>
  );
}

// One head at several steps: how its picture came to be.
function OverTime({ run, asked, steps, step, head, dark }: { run: RunLine; asked: Record<string, string | number | null | undefined>; steps: number[]; step: number; head: number; dark: boolean }) {
  const chosen = [...new Set(Array.from({ length: Math.min(OVER_TIME, steps.length) }, (_, i, all = Math.min(OVER_TIME, steps.length)) => steps[Math.round((i * (steps.length - 1)) / Math.max(1, all - 1))] ?? 0))];
  const answer = useAnswer(JSON.stringify([run.name, run.revision, asked["site"], asked["index"], chosen]), (signal) =>
    Promise.all(chosen.map((s) => askPacked<SliceFacts>("slice", { ...asked, step: s }, signal).catch(() => null))), `${run.name} ${asked["site"]}`);
  return (
    <div>
      <h2>Head {head} over time</h2>
      <div class="filters" data-testid="overtime">
        {(answer.value ?? []).map((slice, i) => slice && (
          <button key={chosen[i]} aria-pressed={chosen[i] === step} class={chosen[i] === step ? "on" : ""} onClick={() => adjust({ step: chosen[i] })}>
            <Thumb slice={slice} picture={Math.min(head, slice.facts.pictures - 1)} colours={weights(slice, dark)} size={96} /><span>step {chosen[i]}</span>
          </button>
        ))}
      </div>
    </div>
  );
}

interface EntropyFacts { heads: number; places: number }

function Entropy({ run, site, head }: { run: RunLine; site: string; head: number }) {
  const dark = useDark();
  const answer = useAnswer(JSON.stringify([run.name, run.revision, site]), (signal) => askPacked<EntropyFacts>("entropy", { run: run.name, site }, signal), `${run.name} ${site}`);
  const drawn = useMemo(() => {
    const packed = answer.value;
    const steps = packed?.arrays["steps"];
    const bits = packed?.arrays["entropy"];
    if (!packed || !steps || !bits) return null;
    const colours = lineColours(dark);
    const heads = packed.facts.heads;
    const lines = Array.from({ length: heads }, (_, h) => ({ label: `head ${h}`, colour: colours[h % colours.length] ?? "", width: h === head ? 3 : 1, values: Array.from(steps, (_s, i) => bits[i * heads + h] ?? NaN) }));
    return { steps, lines, most: Math.log2(packed.facts.places) };
  }, [answer.value, dark, head]);
  if (!drawn) return null;
  return (
    <div>
      <h2>Entropy <span class="quiet">bits; at most {show(Number(drawn.most.toPrecision(3)))}. Low: looks at few places</span></h2>
      <Chart name={`${site}-entropy`} steps={drawn.steps} lines={drawn.lines} height={170} />
    </div>
  );
}

// Most weights are small and their differences matter: a square root gives them half of the colours.
const weights = (slice: Slice, dark: boolean): Colours => {
  const colours = coloursFor(slice, dark);
  return colours.low >= 0 ? { ...colours, low: 0, bend: 0.5 } : colours;
};
