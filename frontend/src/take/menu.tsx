// "Take": the picture as PNG or SVG, its numbers as CSV.

import { useRef } from "preact/hooks";
import { ink } from "../theme";
import { flatten, save } from "./save";

interface Props {
  name: string;
  png?: () => HTMLCanvasElement[]; // layers, the lowest first
  svg?: () => string;
  csv: () => string;
}

export function Take({ name, png, svg, csv }: Props) {
  const box = useRef<HTMLDetailsElement>(null);
  const give = (ending: string, make: () => Blob | null) => () => {
    const made = make();
    if (made) save(`${name}.${ending}`, made);
    if (box.current) box.current.open = false;
  };
  const picture = () => {
    if (png) flatten(png(), ink("--paper")).toBlob((blob) => blob && save(`${name}.png`, blob), "image/png");
    return null;
  };
  return (
    <details class="take" ref={box}>
      <summary title="Save this picture or its numbers" aria-label={`Save ${name}`}>save</summary>
      <div class="menu">
        {png && <button onClick={give("png", picture)}>PNG</button>}
        {svg && <button onClick={give("svg", () => new Blob([svg()], { type: "image/svg+xml" }))}>SVG</button>}
        <button onClick={give("csv", () => new Blob([csv()], { type: "text/csv" }))}>CSV</button>
      </div>
    </details>
  );
}
