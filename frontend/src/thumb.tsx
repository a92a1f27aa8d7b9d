// A slice in the size of a stamp.

import { useEffect, useRef } from "preact/hooks";
import { paintSlice, type Colours, type Slice } from "./picture";

export function Thumb({ slice, picture, colours, size = 144 }: { slice: Slice; picture: number; colours: Colours; size?: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context || !canvas.current) return;
    canvas.current.width = canvas.current.height = size;
    context.imageSmoothingEnabled = false;
    context.drawImage(paintSlice(slice, picture, colours), 0, 0, size, size);
  }, [slice, picture, colours.lut, colours.low, colours.high, size]);
  return <canvas ref={canvas} aria-hidden="true" />;
}
