// Where answers come from: the server, or the archive inside a report. The rest of the page cannot tell.

import { unpack, type Packed } from "./wire";

export type Params = Record<string, string | number | null | undefined>;

interface Source {
  readonly live: boolean;
  ask(question: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer>;
}

export class AskError extends Error {
  constructor(message: string, readonly status: number) {
    super(message);
  }
}

function query(params: Params): string {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  given.sort(([a], [b]) => (a < b ? -1 : 1));
  return new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
}

class Server implements Source {
  readonly live = true;

  async ask(question: string, params: Params, signal?: AbortSignal): Promise<ArrayBuffer> {
    let reply: Response;
    try {
      reply = await fetch(`api/${question}?${query(params)}`, { signal: signal ?? null, credentials: "same-origin" });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new AskError("the viewer does not answer; this page goes on by itself once `torchtap view` runs again", 0);
    }
    if (!reply.ok) {
      const said = (await reply.json().catch(() => null)) as { error?: string } | null;
      throw new AskError(said?.error ?? `the viewer answered ${reply.status}`, reply.status);
    }
    return reply.arrayBuffer();
  }
}

// How much of a thing is wanted is the server's business; a report holds one size of each.
const SIZES = new Set(["rows", "columns", "points", "size", "from", "to", "top", "bottom", "left", "right", "since"]);

class Archive implements Source {
  readonly live = false;
  private readonly entries: Promise<Map<string, ArrayBuffer>>;

  constructor(text: string) {
    this.entries = this.open(text);
  }

  private async open(text: string): Promise<Map<string, ArrayBuffer>> {
    const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const body = await new Response(stream).arrayBuffer();
    const length = new DataView(body).getUint32(0, true);
    const index = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length))) as [string, number, number][];
    return new Map(index.map(([key, at, size]) => [key, body.slice(4 + length + at, 4 + length + at + size)]));
  }

  async ask(question: string, params: Params): Promise<ArrayBuffer> {
    // A report holds all statistics of a series at once.
    const kept = Object.fromEntries(Object.entries(params).filter(([name]) => !SIZES.has(name) && name !== "statistics"));
    const found = (await this.entries).get(`${question}?${query(kept)}`);
    if (!found) throw new AskError("this is not part of the report; `torchtap view` shows all of the run", 404);
    return found;
  }
}

const embedded = document.getElementById("torchtap-archive");
const source: Source = embedded ? new Archive(embedded.textContent ?? "") : new Server();

export const live = source.live;

export async function askJson<T>(question: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
  return JSON.parse(new TextDecoder().decode(await source.ask(question, params, signal))) as T;
}

// Change a run; only a viewer that was started with --manage listens.
export async function change(run: string, action: string, value: unknown): Promise<string> {
  const reply = await fetch("manage", {
    method: "POST", credentials: "same-origin", headers: { "content-type": "application/json", "x-torchtap": "page" },
    body: JSON.stringify({ run, action, value }),
  });
  const said = (await reply.json().catch(() => ({}))) as { error?: string; run?: string };
  if (!reply.ok) throw new AskError(said.error ?? `the viewer answered ${reply.status}`, reply.status);
  return said.run ?? run;
}

export async function askPacked<Facts>(question: string, params: Params, signal?: AbortSignal): Promise<Packed<Facts>> {
  return unpack<Facts>(await source.ask(question, params, signal));
}
