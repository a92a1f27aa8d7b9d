// Colour maps made in OKLCH: lightness rises evenly from one end to the other, so that the order of values
// survives every kind of colour blindness and a black-and-white print. Hues only help.

type Rgb = [number, number, number];

function oklch(lightness: number, chroma: number, hue: number): Rgb | null {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  if (linear.some((c) => c < -1e-4 || c > 1.0001)) return null;
  return linear.map((c) => {
    const x = Math.min(1, Math.max(0, c));
    return 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
  }) as Rgb;
}

// The colour itself, or the most colourful one of that lightness and hue that a screen has.
function inGamut(lightness: number, chroma: number, hue: number): Rgb {
  for (let c = chroma; c > 0; c -= 0.004) {
    const found = oklch(lightness, c, hue);
    if (found) return found;
  }
  const grey = 255 * lightness;
  return [grey, grey, grey];
}

const SIZE = 256;

function table(colour: (t: number) => Rgb): Uint8Array {
  const lut = new Uint8Array(SIZE * 3);
  for (let i = 0; i < SIZE; i++) lut.set(colour(i / (SIZE - 1)).map(Math.round), i * 3);
  return lut;
}

// From deep blue over green to pale yellow.
export const sequential = table((t) => inGamut(0.24 + 0.7 * t, 0.13, 285 - 185 * t ** 0.9));

// Blue below zero, orange above; the middle is the page itself.
const arm = (t: number, middle: number, end: number): Rgb => {
  const away = Math.abs(2 * t - 1);
  return inGamut(middle + (end - middle) * away, 0.17 * away, t < 0.5 ? 255 : 50);
};
const divergingLight = table((t) => arm(t, 0.97, 0.45));
const divergingDark = table((t) => arm(t, 0.23, 0.82));

export const diverging = (dark: boolean): Uint8Array => (dark ? divergingDark : divergingLight);

export function css(lut: Uint8Array, t: number): string {
  const i = Math.round(Math.min(1, Math.max(0, t)) * (SIZE - 1)) * 3;
  return `rgb(${lut[i]},${lut[i + 1]},${lut[i + 2]})`;
}

export function gradient(lut: Uint8Array): string {
  const stops = Array.from({ length: 17 }, (_, i) => css(lut, i / 16));
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

// Lines: any two differ by at least 23 in CIELAB, on light and dark pages, also for eyes without one kind of cone.
const hex = (rgb: Rgb): string => `#${rgb.map((c) => Math.round(c).toString(16).padStart(2, "0")).join("")}`;
const LINES: [number, number][] = [[0.48, 270], [0.72, 130], [0.36, 330], [0.52, 120], [0.72, 330], [0.72, 160], [0.52, 350], [0.36, 20]];
export const lines = (dark: boolean): string[] => LINES.map(([lightness, hue]) => hex(inGamut(dark ? lightness + 0.18 : lightness, 0.16, hue)));

// How the n-th of many lines is drawn: eight colours, then the same with other dashes; 32 pairs differ.
const DASHES: (number[] | undefined)[] = [undefined, [8, 4], [2, 3], [10, 3, 2, 3]];
export function strokeOf(n: number, dark: boolean, later = 0): { colour: string; dash?: number[] } {
  const dash = DASHES[(Math.floor(n / LINES.length) + later) % DASHES.length];
  return { colour: lines(dark)[n % LINES.length] ?? "", ...(dash ? { dash } : {}) };
}

// What is not a finite number must not be taken for any colour of a map.
export const NOT_FINITE: Rgb = [229, 20, 82];
