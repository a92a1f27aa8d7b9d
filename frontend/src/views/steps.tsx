// Choosing among the steps at which something was recorded: a slider, and a button that plays them.

import { useEffect, useState } from "preact/hooks";
import { grouped } from "../numbers";

// The recorded step that is nearest to the wanted one.
export const nearest = (steps: number[], wanted: number | null): number =>
  wanted === null ? steps[steps.length - 1] ?? 0 : steps.reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best), steps[0] ?? 0);

interface Props {
  steps: number[];
  step: number;
  choose: (step: number) => void;
  ready?: boolean; // the picture of this step is there: the next may come
}

export function StepSlider({ steps, step, choose, ready = true }: Props) {
  const [playing, setPlaying] = useState(false);
  const position = Math.max(0, steps.indexOf(step));
  useEffect(() => {
    if (!playing || !ready) return;
    const timer = window.setTimeout(() => {
      const next = steps[position + 1];
      if (next === undefined) setPlaying(false);
      else choose(next);
    }, 350);
    return () => window.clearTimeout(timer);
  }, [playing, ready, position, steps.length]);
  if (steps.length < 2) return <label>step <output>{grouped(step)}</output></label>;
  const play = () => {
    if (!playing && position === steps.length - 1) choose(steps[0] ?? step);
    setPlaying(!playing);
  };
  return (
    <label>step
      <button class="chip" aria-pressed={playing} onClick={play} aria-label={playing ? "Stop" : "Play"}>{playing ? "❚❚" : "▶"}</button>
      <input type="range" aria-label="Step" min={0} max={steps.length - 1} value={position} aria-valuetext={`step ${step}`} onInput={(e) => { setPlaying(false); choose(steps[Number(e.currentTarget.value)] ?? step); }} />
      <output>{grouped(step)}</output>
    </label>
  );
}
