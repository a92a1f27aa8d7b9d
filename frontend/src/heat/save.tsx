// The map as a file: the picture that is shown, and the numbers of its cells.

import { Take } from "../take/menu";
import { csv } from "../take/save";
import { SvgPen, type Pen } from "../take/svg";
import { ink } from "../theme";
import { FONT, type Frame } from "./draw";
import type { Grid } from "./grid";

interface Props {
  grid: Grid;
  names: string[];
  frame: Frame;
  layers: () => HTMLCanvasElement[];
  draw: (pen: Pen) => void;
}

export function MapSave({ grid, names, frame, layers, draw }: Props) {
  const svg = () => {
    const pen = new SvgPen(frame.width, frame.height, ink("--paper"));
    pen.font = FONT;
    draw(pen);
    return pen.text();
  };
  // One line a cell: where several steps or sites share it, its least and its greatest value.
  const table = () => csv(["row", "first_step", "last_step", "least", "greatest"], cells(grid, names));
  return <Take name={`${grid.facts.run}-${grid.facts.statistic}-map`} png={layers} svg={svg} csv={table} />;
}

function* cells(grid: Grid, names: string[]): Iterable<(string | number)[]> {
  for (let row = 0; row < grid.rows; row++) {
    for (let column = 0; column < grid.columns; column++) {
      const at = row * grid.columns + column;
      const low = grid.low[at] ?? NaN;
      if (!Number.isNaN(low)) yield [names[row] ?? "", grid.steps[column] ?? 0, grid.lastStepOf(column), low, grid.high[at] ?? low];
    }
  }
}
