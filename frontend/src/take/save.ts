// Files that leave the page: a picture or a table, made here and nowhere else.

export function save(name: string, what: Blob): void {
  const address = URL.createObjectURL(what);
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name.replace(/[^\w.+=@-]+/g, "_").slice(0, 120);
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Numbers with every digit, texts in quotes where they need them; a cell never begins like a formula.
export function csv(header: string[], rows: Iterable<(string | number | null | undefined)[]>): string {
  const cell = (value: string | number | null | undefined): string => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return Number.isNaN(value) ? "NaN" : String(value);
    const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  const lines = [header.map(cell).join(",")];
  for (const row of rows) lines.push(row.map(cell).join(","));
  return `${lines.join("\n")}\n`;
}

// Several canvases that lie over each other as one picture on the page's paper.
export function flatten(layers: HTMLCanvasElement[], paper: string): HTMLCanvasElement {
  const whole = document.createElement("canvas");
  whole.width = Math.max(1, ...layers.map((c) => c.width));
  whole.height = Math.max(1, ...layers.map((c) => c.height));
  const context = whole.getContext("2d");
  if (context) {
    context.fillStyle = paper;
    context.fillRect(0, 0, whole.width, whole.height);
    for (const layer of layers) if (layer.width && layer.height) context.drawImage(layer, 0, 0);
  }
  return whole;
}
