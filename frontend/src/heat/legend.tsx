// The colours and what they mean.

import { gradient } from "../colour";
import { brief } from "../numbers";
import type { Scale } from "../scale";

export function Legend({ scale, marked, each }: { scale: Scale; marked: boolean; each: boolean }) {
  const all = [0, 0.25, 0.5, 0.75, 1];
  const long = all.some((p) => brief(scale.value(p)).length > 5) && window.innerWidth < 1200;
  const places = long ? [0, 0.5, 1] : all;
  return (
    <div class="legend" role="group" aria-label="Colours">
      <div class="bar">
        <div class="ramp" style={{ background: gradient(scale.lut) }} />
        <div class="ticks">
          {each
            ? <><span style={{ left: "0%" }}>row's least</span><span style={{ left: "100%" }}>greatest</span></>
            : places.map((p) => (
                <span key={p} style={{ left: `${p * 100}%` }}>
                  {scale.clipped && p === 0 ? "≤ " : scale.clipped && p === 1 ? "≥ " : ""}{brief(scale.value(p))}
                </span>
              ))}
        </div>
      </div>
      <span class="key"><i class="absent" />not recorded</span>
      {marked && <span class="key"><i class="broken" />NaN or inf</span>}
    </div>
  );
}
