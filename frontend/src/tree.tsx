// The model on the left: modules as they nest, searched, each with its health.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count } from "./numbers";
import { href } from "./route";
import type { About, Mark, Module } from "./types";
import { MARK_WORDS, siteWord } from "./words";

interface Node {
  path: string;
  label: string;
  module: Module | null;
  children: Node[];
  mark: Mark | null;
  sites: number[]; // of the module itself
  parameters: number; // of the module and all below
}

const GRAVITY: Mark[] = ["nan", "spread", "warning"];

function worse(a: Mark | null, b: Mark | null): Mark | null {
  return GRAVITY.find((mark) => mark === a || mark === b) ?? null;
}

// From the recorded tree of modules; sites of modules that it does not know hang from paths of their own.
function build(about: About, marks: Record<string, Mark>): Node {
  const known = new Map<string, Node>();
  const make = (path: string, label: string, module: Module | null): Node => {
    const node: Node = { path, label, module, children: [], mark: null, sites: [], parameters: module?.parameters ?? 0 };
    known.set(path, node);
    return node;
  };
  const root = make("", about.model?.class || "model", about.model);
  const walk = (module: Module, node: Node): void => {
    for (const child of module.children) {
      if (known.has(child.path)) continue;
      const made = make(child.path, child.name || child.path, child);
      node.children.push(made);
      walk(child, made);
    }
  };
  if (about.model) walk(about.model, root);
  const place = (path: string): Node => {
    const found = known.get(path);
    if (found) return found;
    const cut = path.lastIndexOf(".");
    const parent = place(cut < 0 ? "" : path.slice(0, cut));
    const made = make(path, path.slice(cut + 1), null);
    parent.children.push(made);
    return made;
  };
  about.sites.forEach((site, index) => {
    const node = place(site.module);
    node.sites.push(index);
    node.mark = worse(node.mark, marks[site.name] ?? null);
  });
  const sum = (node: Node): void => {
    for (const child of node.children) {
      sum(child);
      node.parameters += child.parameters;
      node.mark = worse(node.mark, child.mark);
    }
  };
  sum(root);
  return root;
}

export function HealthMark({ mark }: { mark: Mark | null | undefined }) {
  const word = mark ? MARK_WORDS[mark] : "fine";
  return <span class={`health ${mark ?? "fine"}`} role="img" aria-label={word} title={word} />;
}

interface Props {
  about: About;
  marks: Record<string, Mark>;
  params: Record<string, string>; // everything else of the view stays when a module or a site is chosen
  selected: string;
  under: string;
}

const MOST_RESULTS = 200;

export function ModelTree({ about, marks, params, selected, under }: Props) {
  const [search, setSearch] = useState("");
  const [at, setAt] = useState(0); // which result is chosen
  const [open, setOpen] = useState<Set<string>>(new Set([""]));
  const list = useRef<HTMLDivElement>(null);
  const root = useMemo(() => build(about, marks), [about, marks]);
  const module = about.sites.find((s) => s.name === selected)?.module ?? under;

  useEffect(() => {
    // Small models are shown whole; in large ones the way to the selected module is open.
    const shown = new Set([""]);
    const every = (node: Node, depth: number): void => {
      if (about.sites.length <= 24 || depth < 1) shown.add(node.path);
      node.children.forEach((child) => every(child, depth + 1));
    };
    every(root, 0);
    setOpen((old) => new Set([...old, ...shown]));
  }, [root]);

  useEffect(() => {
    if (!module) return;
    setOpen((old) => {
      const more = new Set(old);
      module.split(".").forEach((_, i, parts) => more.add(parts.slice(0, i + 1).join(".")));
      return more;
    });
    requestAnimationFrame(() => list.current?.querySelector(".selected")?.scrollIntoView({ block: "nearest" }));
  }, [module, selected]);

  const wanted = search.trim().toLowerCase();
  const results = wanted ? about.sites.filter((s) => `${s.name} ${siteWord(s.name)} ${s.class}`.toLowerCase().includes(wanted)) : [];

  const row = (node: Node, depth: number): preact.ComponentChildren => {
    const isOpen = open.has(node.path);
    const expandable = node.children.length > 0 || node.sites.length > 0;
    return (
      <div key={node.path} role="group" data-module={node.path} aria-label={node.path || node.label}>
        <div class={`module ${node.path === under && under ? "selected" : ""}`} style={{ paddingLeft: `${depth * 14 + 4}px` }}>
          <button
            class="twist" disabled={!expandable} aria-expanded={expandable ? isOpen : undefined} aria-label={`${isOpen ? "close" : "open"} ${node.path || node.label}`}
            onClick={() => setOpen((old) => {
              const next = new Set(old);
              if (!next.delete(node.path)) next.add(node.path);
              return next;
            })}
          >{expandable ? (isOpen ? "▾" : "▸") : ""}</button>
          <a class="name" href={href("map", { ...params, under: node.path, top: null, bottom: null })} title={moduleTitle(node)}>
            <HealthMark mark={node.mark} />
            <span class="text">{node.label}</span>
            {node.path !== "" && <span class="class">{node.module?.class}</span>}
            <span class="figure">{node.parameters > 0 ? count(node.parameters) : ""}</span>
          </a>
        </div>
        {isOpen && structures(loggedFirst(node.sites, about), about).map(([name, sites]) => (sites.length <= (name === "optim_state" ? 1 : FEW_LEAVES)
          ? sites.map((index) => site(index, depth + 1))
          : structure(`${node.path}:${name}`, name, sites, depth + 1)))}
        {isOpen && node.children.map((child) => row(child, depth + 1))}
      </div>
    );
  };

  // A cache, the state of an optimizer: one line until it is opened.
  const structure = (key: string, name: string, sites: number[], depth: number) => {
    const isOpen = open.has(key) || sites.some((index) => about.sites[index]?.name === selected);
    const mark = sites.reduce<Mark | null>((found, index) => worse(found, marks[about.sites[index]?.name ?? ""] ?? null), null);
    return (
      <div key={key} role="group" aria-label={name}>
        <div class="module" style={{ paddingLeft: `${depth * 14 + 4}px` }}>
          <button class="twist" aria-expanded={isOpen} aria-label={`${isOpen ? "close" : "open"} ${key}`} onClick={() => setOpen((old) => { const next = new Set(old); if (!next.delete(key)) next.add(key); return next; })}>{isOpen ? "▾" : "▸"}</button>
          <span class="name structure"><HealthMark mark={mark} /><span class="text">{name}</span><span class="figure">{sites.length} leaves</span></span>
        </div>
        {isOpen && sites.map((index) => site(index, depth + 1))}
      </div>
    );
  };

  const site = (index: number, depth: number, whole = false, chosen = false) => {
    const one = about.sites[index];
    if (!one) return null;
    const tail = one.name.slice(one.name.lastIndexOf(":") + 1);
    return (
      <a
        key={one.name} class={`site ${one.name === selected ? "selected" : ""} ${chosen ? "chosen" : ""}`} aria-current={one.name === selected ? "true" : undefined} style={{ paddingLeft: `${depth * 14 + 24}px` }}
        href={href("site", { ...params, site: one.name })} title={`${one.name}${one.shape ? `  [${one.shape.join(" × ")}]` : ""}`}
      >
        <HealthMark mark={marks[one.name]} />
        <span class="text">{one.kind === "value" || whole ? siteWord(one.name) : tail}</span>
        {one.shape && one.shape.length > 0 && <span class="figure">{one.shape.join("×")}</span>}
      </a>
    );
  };

  return (
    <nav class="tree" aria-label="Model">
      <input
        id="search" type="search" placeholder="Search modules and sites   /" value={search} aria-label="Search"
        aria-controls="found" aria-describedby="found-count"
        onInput={(e) => { setSearch(e.currentTarget.value); setAt(0); }}
        onKeyDown={(e) => {
          const most = Math.min(results.length, MOST_RESULTS) - 1;
          if (e.key === "Escape") { setSearch(""); e.currentTarget.blur(); }
          const turn = e.key === "ArrowDown" ? 1 : e.key === "ArrowUp" ? -1 : 0;
          if (turn && most >= 0) {
            e.preventDefault();
            setAt(Math.max(0, Math.min(most, at + turn)));
            requestAnimationFrame(() => list.current?.querySelector(".chosen")?.scrollIntoView({ block: "nearest" }));
          }
          const found = results[Math.min(at, most)];
          if (e.key === "Enter" && found) location.hash = href("site", { ...params, site: found.name });
        }}
      />
      <span id="found-count" class="unseen" role="status">{wanted ? `${results.length} found` : ""}</span>
      <div class="list" id="found" ref={list}>
        {wanted
          ? results.length === 0
            ? <p class="quiet">Nothing is called “{search}”.</p>
            : <>
                {results.slice(0, MOST_RESULTS).map((s, i) => site(about.sites.indexOf(s), -1, true, i === at))}
                {results.length > MOST_RESULTS && <p class="quiet">{results.length - MOST_RESULTS} more</p>}
              </>
          : row(root, 0)}
      </div>
    </nav>
  );
}

const FEW_LEAVES = 6;

// The sites of a module by kind and first component of the leaf, in order.
function structures(sites: number[], about: About): [string, number[]][] {
  const found = new Map<string, number[]>();
  for (const index of sites) {
    const name = about.sites[index]?.name ?? "";
    const tail = name.slice(name.lastIndexOf(":") + 1).replace(/#.*/, "");
    const key = about.sites[index]?.kind === "value" ? name : about.sites[index]?.kind === "optim_state" ? "optim_state" : tail.split(".").slice(0, 2).join(".");
    found.set(key, [...(found.get(key) ?? []), index]);
  }
  return [...found];
}

const loggedFirst = (sites: number[], about: About): number[] =>
  [...sites].sort((a, b) => Number(about.sites[b]?.kind === "value") - Number(about.sites[a]?.kind === "value"));

function moduleTitle(node: Node): string {
  const parts = [node.path || "the whole model", node.module?.class, node.module?.source];
  if (node.parameters) parts.push(`${node.parameters.toLocaleString("en-US")} parameters`);
  return parts.filter(Boolean).join("\n");
}
