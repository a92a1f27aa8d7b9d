// State that lives outside the page's components, such as the address or the system's colours.

import { useEffect, useState } from "preact/hooks";

export interface Outside<T> {
  changed: () => void; // to call after every change
  use: () => T; // the present value, in a component
}

export function outside<T>(read: () => T): Outside<T> {
  const listeners = new Set<() => void>();
  return {
    changed: () => listeners.forEach((tell) => tell()),
    use: () => {
      const [value, setValue] = useState(read);
      useEffect(() => {
        const tell = () => setValue(read());
        listeners.add(tell);
        tell(); // an effect runs after the first paint: a change before that was not heard of
        return () => void listeners.delete(tell);
      }, []);
      return value;
    },
  };
}
