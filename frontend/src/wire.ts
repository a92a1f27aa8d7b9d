// Reads the server's binary answers: a JSON header, then arrays that are viewed where they lie.

export type Numbers = Float32Array | Float64Array | Uint8Array | Int32Array;

export interface Packed<Facts> {
  facts: Facts;
  arrays: Record<string, Numbers>;
  shapes: Record<string, number[]>;
}

interface Entry {
  name: string;
  dtype: string;
  shape: number[];
  offset: number;
}

export function unpack<Facts>(body: ArrayBuffer): Packed<Facts> {
  const length = new DataView(body).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length))) as Facts & { arrays: Entry[] };
  const start = 4 + length;
  const arrays: Record<string, Numbers> = {};
  const shapes: Record<string, number[]> = {};
  for (const { name, dtype, shape, offset } of header.arrays) {
    const count = shape.reduce((a, b) => a * b, 1);
    const at = start + offset;
    arrays[name] =
      dtype === "f4" ? new Float32Array(body, at, count)
      : dtype === "f8" ? new Float64Array(body, at, count)
      : dtype === "i4" ? new Int32Array(body, at, count)
      : new Uint8Array(body, at, count);
    shapes[name] = shape;
  }
  return { facts: header, arrays, shapes };
}
