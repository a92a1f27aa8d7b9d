// The steps that are looked at, written as numbers.

import { adjust } from "./route";

const number = (text: string): number | null => {
  const digits = text.replace(/[\s.,'’_]/g, ""); // 10,000 and 10.000 and 10 000
  return digits === "" || !/^-?\d+$/.test(digits) ? null : Number(digits);
};

export function StepRange({ from, to }: { from: number | null; to: number | null }) {
  return (
    <label>steps
      <input class="short" inputMode="numeric" aria-label="First step" placeholder="first" value={from ?? ""} onChange={(e) => adjust({ from: number(e.currentTarget.value) })} /> to
      <input class="short" inputMode="numeric" aria-label="Last step" placeholder="last" value={to ?? ""} onChange={(e) => adjust({ to: number(e.currentTarget.value) })} />
    </label>
  );
}
