// The words under the pointer: where it is, and the value there.

import { grouped, show } from "../numbers";
import type { Scale } from "../scale";
import { ink } from "../theme";
import { siteWord } from "../words";
import type { Frame, Spot } from "./draw";
import type { Cells, Grid } from "./grid";
import type { LossColumns } from "./loss";

interface Props {
  grid: Grid;
  bad: Grid | null;
  scale: Scale;
  statistic: string;
  loss: LossColumns | null;
  spot: Spot;
  frame: Frame;
  cells: Cells;
  pointer: { x: number; y: number } | null;
}

export function Tip({ grid, bad, scale, statistic, loss, spot, frame, cells, pointer }: Props) {
  const at = spot.row * grid.columns + spot.column;
  const low = grid.low[at] ?? NaN;
  const high = grid.high[at] ?? NaN;
  const first = grid.steps[spot.column] ?? 0;
  const last = grid.lastStepOf(spot.column);
  const under = grid.sitesOf(spot.row);
  const module = grid.moduleOf(spot.row);
  const broken = bad && bad.rows === grid.rows && bad.columns === grid.columns ? bad.high[at] ?? 0 : 0;
  const x = pointer?.x ?? frame.left + ((spot.column - cells.left + 0.5) / (cells.right - cells.left)) * frame.cellsWidth;
  const y = pointer?.y ?? frame.top + ((spot.row - cells.top + 0.5) / (cells.bottom - cells.top)) * frame.cellsHeight;
  const narrow = frame.width < 520; // no room at either side: the words stay inside
  const toLeft = !narrow && x > frame.width - 300;
  const left = narrow ? Math.max(2, Math.min(x + 14, frame.width - 216)) : x + (toLeft ? -14 : 14);
  const alone = Number.isNaN(low) || low === high;
  const several = grid.facts.shownSteps > grid.columns && last > first;
  return (
    <div class="tip" style={{ left: `${left}px`, top: `${Math.min(y + 14, frame.height - 116)}px`, transform: toLeft ? "translateX(-100%)" : "" }}>
      <b>{module === null ? siteWord(under[0] ?? "") : module || "(model)"}{under.length > 1 && <span class="quiet">{module === null ? ` and ${under.length - 1} more` : `, ${under.length} sites`}</span>}</b>
      <span>{several ? `steps ${grouped(first)} to ${grouped(last)}` : `step ${grouped(first)}`}</span>
      <span>
        <i class="swatch" style={{ background: Number.isNaN(low) ? ink("--absent") : `rgb(${swatch(scale, grid.value(spot.row, spot.column, grid.usual(scale), scale))})` }} />
        {statistic} {alone ? (Number.isNaN(low) ? (broken > 0 ? "no finite value" : "not recorded") : show(low)) : `${show(low)} to ${show(high)}`}
      </span>
      {loss && <span>{loss.name} {loss.text(spot.column)}</span>}
      {broken > 0 && <span class="bad">{grouped(broken)} NaN or inf</span>}
    </div>
  );
}

function swatch(scale: Scale, value: number): string {
  const i = Math.round(scale.place(value) * 255) * 3;
  return `${scale.lut[i]},${scale.lut[i + 1]},${scale.lut[i + 2]}`;
}
