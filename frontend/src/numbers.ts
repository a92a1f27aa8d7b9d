// Numbers as people read them, and ticks for axes.

export function show(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "−inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    const [mantissa = "", exponent = ""] = value.toExponential(2).split("e");
    const short = mantissa.replace(/\.?0+$/, "");
    return `${short}e${exponent.replace("+", "").replace("-", "−")}`.replace(/^-/, "−");
  }
  const text = Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return text.replace(/^-/, "−");
}

// Two digits, for colour bars.
export function brief(value: number): string {
  return show(value === 0 ? 0 : Number(value.toPrecision(2)));
}

// All digits that tell the number from its neighbours, for the value under the cursor.
export function exactly(value: number, single: boolean): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  for (let digits = 6; single && digits < 10; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return String(short);
  }
  return String(value);
}

export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return "";
  if (value < 1000) return String(value);
  const units: [number, string][] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]];
  for (const [unit, letter] of units) {
    if (value >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return String(value);
}

export const grouped = (value: number): string => value.toLocaleString("en-US");

// Round places between low and high, about `about` of them.
export function ticks(low: number, high: number, about: number): number[] {
  const span = high - low;
  if (!(span > 0) || about < 1) return [low];
  const rough = span / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? 10 * power;
  const found: number[] = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Number(t.toPrecision(12)));
  return found;
}

export function plural(n: number, word: string): string {
  return `${grouped(n)} ${word}${n === 1 ? "" : "s"}`;
}

// Places for a logarithmic axis: powers of ten, with 2 and 5 between where there are few decades.
export function logTicks(low: number, high: number, about: number): number[] {
  if (!(low > 0) || !(high > low)) return [low];
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const decades = to - from;
  const each = decades <= Math.max(1, about / 3) ? [1, 2, 5] : [1];
  const stride = each.length > 1 ? 1 : Math.max(1, Math.ceil(decades / about));
  const found: number[] = [];
  for (let power = Math.ceil(from / stride) * stride; power <= to; power += stride) {
    for (const m of each) {
      const tick = Number((m * 10 ** power).toPrecision(12));
      if (tick >= low * 0.999999 && tick <= high * 1.000001) found.push(tick);
    }
  }
  return found.length > 1 ? found : ticks(low, high, about);
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
