// Light or dark: what the system says, until somebody chooses.

import { useEffect, useState } from "preact/hooks";

const KEY = "torchtap-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function chosen(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a report opened from a file may have no storage
  }
}

let choice = chosen();
export const isDark = (): boolean => (choice ? choice === "dark" : system.matches);

function apply(): void {
  document.documentElement.dataset["theme"] = isDark() ? "dark" : "light";
  listeners.forEach((tell) => tell());
}

export function toggleTheme(): void {
  choice = isDark() ? "light" : "dark";
  try {
    localStorage.setItem(KEY, choice);
  } catch {
    // not kept, still shown
  }
  apply();
}

system.addEventListener("change", apply);
apply();

export function useDark(): boolean {
  const [dark, setDark] = useState(isDark);
  useEffect(() => {
    const tell = () => setDark(isDark());
    listeners.add(tell);
    return () => void listeners.delete(tell);
  }, []);
  return dark;
}

export const ink = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
