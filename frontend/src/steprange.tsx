// The steps that are looked at, written as numbers.

import { Field } from "./field";
import { adjust } from "./route";

const number = (text: string): number | null => {
  const digits = text.replace(/[\s.,'’_]/g, ""); // 10,000 and 10.000 and 10 000
  return digits === "" || !/^-?\d+$/.test(digits) ? null : Number(digits);
};

export function StepRange({ from, to }: { from: number | null; to: number | null }) {
  return (
    <label>steps
      <Field label="First step" placeholder="first" value={from} change={(text) => adjust({ from: number(text) })} /> to
      <Field label="Last step" placeholder="last" value={to} change={(text) => adjust({ to: number(text) })} />
    </label>
  );
}
