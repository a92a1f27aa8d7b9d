// A small window over the page: Escape closes it, the keyboard stays inside, and goes back to where it was.

import { useEffect, useRef } from "preact/hooks";
import type { ComponentChildren } from "preact";

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    box.current?.showModal();
    return () => before?.focus();
  }, []);
  return (
    <dialog ref={box} class="dialog" aria-label={title} onCancel={(e) => { e.preventDefault(); close(); }} onClick={(e) => e.target === box.current && close()}>
      <div class="inside"><h2>{title}</h2>{children}</div>
    </dialog>
  );
}
