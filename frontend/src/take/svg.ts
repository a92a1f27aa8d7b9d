// Draws what a canvas would draw as SVG: the same drawing code makes both pictures.

const escape = (text: string): string => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const round = (n: number): string => String(Math.round(n * 100) / 100);

export type Pen = Pick<
  CanvasRenderingContext2D,
  | "fillRect" | "strokeRect" | "beginPath" | "moveTo" | "lineTo" | "closePath" | "arc" | "roundRect" | "rect" | "clip" | "fill" | "stroke"
  | "fillText" | "measureText" | "drawImage" | "save" | "restore" | "translate" | "rotate" | "setLineDash"
  | "fillStyle" | "strokeStyle" | "lineWidth" | "lineJoin" | "font" | "textAlign" | "textBaseline" | "imageSmoothingEnabled"
>;

interface State { fillStyle: string; strokeStyle: string; lineWidth: number; textAlign: CanvasTextAlign; textBaseline: CanvasTextBaseline; dash: number[]; groups: number }

export class SvgPen {
  fillStyle = "#000";
  strokeStyle = "#000";
  lineWidth = 1;
  lineJoin: CanvasLineJoin = "round";
  font = "11px sans-serif";
  textAlign: CanvasTextAlign = "left";
  textBaseline: CanvasTextBaseline = "alphabetic";
  imageSmoothingEnabled = false;
  private readonly parts: string[] = [];
  private path = "";
  private dash: number[] = [];
  private groups = 0;
  private clips = 0;
  private readonly kept: State[] = [];
  private readonly ruler = document.createElement("canvas").getContext("2d");

  constructor(private readonly width: number, private readonly height: number, private readonly paper: string) {}

  private open(tag: string): void {
    this.parts.push(tag);
    this.groups++;
  }

  private line(): string {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    return `stroke="${escape(this.strokeStyle)}" stroke-width="${round(this.lineWidth)}" stroke-linejoin="round"${dash}`;
  }

  save(): void {
    this.kept.push({ fillStyle: this.fillStyle, strokeStyle: this.strokeStyle, lineWidth: this.lineWidth, textAlign: this.textAlign, textBaseline: this.textBaseline, dash: this.dash, groups: this.groups });
    this.groups = 0;
  }

  restore(): void {
    this.parts.push("</g>".repeat(this.groups));
    const old = this.kept.pop();
    if (old) Object.assign(this, old);
  }

  translate(x: number, y: number): void { this.open(`<g transform="translate(${round(x)} ${round(y)})">`); }
  rotate(angle: number): void { this.open(`<g transform="rotate(${round((angle * 180) / Math.PI)})">`); }
  setLineDash(dash: number[]): void { this.dash = dash; }

  fillRect(x: number, y: number, w: number, h: number): void {
    this.parts.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(Math.max(0, w))}" height="${round(Math.max(0, h))}" fill="${escape(this.fillStyle)}"/>`);
  }
  strokeRect(x: number, y: number, w: number, h: number): void {
    this.parts.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(Math.max(0, w))}" height="${round(Math.max(0, h))}" fill="none" ${this.line()}/>`);
  }
  beginPath(): void { this.path = ""; }
  moveTo(x: number, y: number): void { this.path += `M${round(x)} ${round(y)}`; }
  lineTo(x: number, y: number): void { this.path += `L${round(x)} ${round(y)}`; }
  closePath(): void { this.path += "Z"; }
  rect(x: number, y: number, w: number, h: number): void { this.path += `M${round(x)} ${round(y)}h${round(w)}v${round(h)}h${round(-w)}Z`; }
  roundRect(x: number, y: number, w: number, h: number): void { this.rect(x, y, w, h); }
  arc(x: number, y: number, r: number): void {
    this.path += `M${round(x - r)} ${round(y)}a${round(r)} ${round(r)} 0 1 0 ${round(2 * r)} 0a${round(r)} ${round(r)} 0 1 0 ${round(-2 * r)} 0Z`;
  }
  clip(): void {
    this.clips++;
    this.open(`<clipPath id="c${this.clips}"><path d="${this.path}"/></clipPath><g clip-path="url(#c${this.clips})">`);
  }
  fill(): void { this.parts.push(`<path d="${this.path}" fill="${escape(this.fillStyle)}"/>`); }
  stroke(): void { this.parts.push(`<path d="${this.path}" fill="none" ${this.line()}/>`); }
  measureText(text: string): TextMetrics {
    if (this.ruler) this.ruler.font = this.font;
    return this.ruler?.measureText(text) ?? ({ width: text.length * 6 } as TextMetrics);
  }
  fillText(text: string, x: number, y: number): void {
    const anchor = { right: "end", end: "end", center: "middle", left: "start", start: "start" }[this.textAlign];
    const shift = { top: 0.8, hanging: 0.8, middle: 0.35, bottom: -0.2, ideographic: -0.2, alphabetic: 0 }[this.textBaseline];
    const size = Number(/([\d.]+)px/.exec(this.font)?.[1] ?? 11);
    this.parts.push(`<text x="${round(x)}" y="${round(y + shift * size)}" font-size="${size}" text-anchor="${anchor}" fill="${escape(this.fillStyle)}">${escape(text)}</text>`);
  }
  // A picture of cells stays a picture: a million rectangles help nobody. Whole, or the part of it as canvas takes it.
  drawImage(image: CanvasImageSource, ...at: number[]): void {
    const source = image as HTMLCanvasElement;
    const [sx = 0, sy = 0, sw = 0, sh = 0] = at.length === 8 ? at : [0, 0, source.width, source.height];
    const [x = 0, y = 0, w = 0, h = 0] = at.slice(-4);
    const part = document.createElement("canvas");
    part.width = Math.max(1, Math.round(sw));
    part.height = Math.max(1, Math.round(sh));
    part.getContext("2d")?.drawImage(source, sx, sy, sw, sh, 0, 0, part.width, part.height);
    this.parts.push(`<image x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" preserveAspectRatio="none" image-rendering="pixelated" href="${part.toDataURL("image/png")}"/>`);
  }

  text(): string {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}" font-family="system-ui, sans-serif">`
      + `<rect width="100%" height="100%" fill="${escape(this.paper)}"/>${this.parts.join("")}${"</g>".repeat(this.groups)}</svg>`;
  }
}
