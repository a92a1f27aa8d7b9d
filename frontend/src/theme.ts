// Light or dark: what the system says, until somebody chooses.

import { outside } from "./outside";

const KEY = "torchtap-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

function chosen(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a report opened from a file may have no storage
  }
}

let choice = chosen();
export const isDark = (): boolean => (choice ? choice === "dark" : system.matches);
const theme = outside(isDark);
export const useDark = theme.use;

function apply(): void {
  document.documentElement.dataset["theme"] = isDark() ? "dark" : "light";
  theme.changed();
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

export const ink = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
