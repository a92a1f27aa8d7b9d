// Attention maps: one layer at a time, all heads small, one head large, tokens as labels where the run has them.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { askPacked } from "../api";
import type { ViewProps } from "../app";
import { gradient } from "../colour";
import { useAnswer, useJson } from "../data";
import { show } from "../numbers";
import { coloursFor, paintSlice, Picture, type Colours, type Slice, type SliceFacts } from "../picture";
import { adjust } from "../route";
import { useDark } from "../theme";
import type { TensorGroup } from "../types";
import { nearest, StepSlider } from "./tensor";

export function AttentionView({ run, about, params }: ViewProps) {
  const dark = useDark();
  const box = useRef<HTMLDivElement>(null);
  const [size, setSize] = useState({ width: 600, height: 500 });
  const [said, setSaid] = useState<string | null>(null);
  const layers = useMemo(() => about.sites.filter((s) => s.kind === "attention" && (about.tensors[s.name] ?? []).includes("tensor")), [about]);
  const site = layers.find((s) => s.name === params["site"]) ?? layers[0];
  const listed = useJson<{ tensors: TensorGroup[] }>("tensors", site ? { run: run.id, site: site.name, revision: run.revision } : null);
  const group = listed.value?.tensors.find((g) => g.field === "value") ?? listed.value?.tensors[0];
  const shape = group?.shape ?? [];
  const step = group ? nearest(group.steps, params["step"] ? Number(params["step"]) : null) : 0;
  const heads = shape.length >= 3 ? shape[shape.length - 3] ?? 1 : 1;
  const examples = shape.length >= 4 ? shape[shape.length - 4] ?? 1 : 1;
  const head = Math.min(Number(params["head"]) || 0, heads - 1);
  const example = Math.min(Number(params["example"]) || 0, examples - 1);
  const stack = shape.length >= 3 ? shape.length - 3 : null;
  const index = shape.length >= 4 ? shape.map((_, axis) => (axis === shape.length - 4 ? example : 0)).join(",") : null;
  const asked = { run: run.id, site: site?.name, step, field: group?.field, stack, index, size: 256 };
  const slice = useAnswer(group && site && shape.length >= 2 ? JSON.stringify(asked) : null, (signal) => askPacked<SliceFacts>("slice", asked, signal));
  const told = useJson<{ tokens: string[] | null }>("tokens", group ? { run: run.id, step } : null);
  const tokens = told.value?.tokens ?? null;

  useEffect(() => {
    if (!box.current) return;
    const watcher = new ResizeObserver(() => box.current && setSize({ width: box.current.clientWidth, height: box.current.clientHeight }));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [slice.value === null, told.value === null && told.error === null]);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if ((event.target as HTMLElement | null)?.closest("input, select, textarea, canvas")) return;
      const position = layers.findIndex((s) => s.name === site?.name);
      if (event.key === "ArrowRight") adjust({ head: (head + 1) % heads });
      if (event.key === "ArrowLeft") adjust({ head: (head + heads - 1) % heads });
      const next = event.key === "ArrowDown" ? layers[position + 1] : event.key === "ArrowUp" ? layers[position - 1] : undefined;
      if (next) adjust({ site: next.name });
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });

  if (!site) {
    return (
      <section class="attention"><p class="quiet">
        This run holds no attention maps. Record them with <code>tt.tap("*:attention", keep=tt.Full())</code>.
      </p></section>
    );
  }
  const labels = tokens && slice.value && tokens.length >= slice.value.facts.columns ? tokens : null;
  const colours = slice.value && weights(slice.value, dark);
  return (
    <section class="attention" aria-label="Attention">
      <div class="tools">
        <label>Layer
          <select aria-label="Layer" value={site.name} onChange={(e) => adjust({ site: e.currentTarget.value })}>
            {layers.map((s) => <option key={s.name} value={s.name}>{s.name.replace(/:attention$/, "")}</option>)}
          </select>
        </label>
        {group && <StepSlider steps={group.steps} step={step} choose={(s) => adjust({ step: s })} />}
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
      {slice.value && (told.value || told.error) && (
        <div class="two">
          <div class="heads" role="listbox" aria-label="Heads">
            {Array.from({ length: slice.value.facts.pictures }, (_, h) => (
              <button key={h} role="option" aria-selected={h === head} class={h === head ? "on" : ""} onClick={() => adjust({ head: h })}>
                <Thumb slice={slice.value as Slice} head={h} dark={dark} />
                <span>head {h}</span>
              </button>
            ))}
          </div>
          <div class="large" ref={box}>
            <p class="said"><b>head {head}</b> <output data-testid="value">{said ?? "rows look at columns: point at a cell"}</output></p>
            <Picture
              slice={slice.value} picture={Math.min(head, slice.value.facts.pictures - 1)} colours={weights(slice.value, dark)} width={size.width - 8} height={size.height - 40} rowLabels={labels} columnLabels={labels} said={setSaid}
              describe={(row, column) => (labels ? `“${labels[row]}” looks at “${labels[column]}”` : `position ${row} looks at ${column}`)}
            />
          </div>
        </div>
      )}
    </section>
  );
}

// Most weights are small and their differences matter: a square root gives them half of the colours.
const weights = (slice: Slice, dark: boolean): Colours => {
  const colours = coloursFor(slice, dark);
  return colours.low >= 0 ? { ...colours, low: 0, bend: 0.5 } : colours;
};

function Thumb({ slice, head, dark }: { slice: Slice; head: number; dark: boolean }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context || !canvas.current) return;
    canvas.current.width = canvas.current.height = 144;
    context.imageSmoothingEnabled = false;
    context.drawImage(paintSlice(slice, head, weights(slice, dark)), 0, 0, 144, 144);
  }, [slice, head, dark]);
  return <canvas ref={canvas} />;
}
