// A short field for a number. What is being written stays there, whatever is drawn anew meanwhile.

import { useState } from "preact/hooks";

interface FieldProps { label: string; value: number | string | null | undefined; change: (text: string) => void; placeholder?: string }

export function Field({ label, value, change, placeholder }: FieldProps) {
  const [draft, setDraft] = useState<string | null>(null);
  return (
    <input
      class="short" inputMode="numeric" aria-label={label} placeholder={placeholder ?? ""} value={draft ?? value ?? ""}
      onInput={(e) => setDraft(e.currentTarget.value)}
      onChange={(e) => { setDraft(null); change(e.currentTarget.value); }}
      onBlur={() => setDraft(null)}
    />
  );
}
