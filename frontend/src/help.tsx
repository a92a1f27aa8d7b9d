// The keys, on demand.

import { Dialog } from "./dialog";

const KEYS: [string, string][] = [
  ["1 – 8", "Runs, scalars, map, site, attention, changes, compare, findings"],
  ["/", "Search the model; arrows and Enter choose"],
  ["arrows", "Move the cross-hair on the map, or to the next site or step"],
  ["Enter", "Open the site under the cross-hair"],
  ["drag, wheel", "Zoom into the map; Shift with the wheel zooms the layers"],
  ["Esc", "Whole map again"],
  ["[   ]", "Previous and next statistic"],
  ["l", "Linear or logarithmic colours"],
  ["t", "Light or dark"],
];

export function Help({ close }: { close: () => void }) {
  return (
    <Dialog title="Keys" close={close}>
      <dl>{KEYS.map(([key, what]) => <><dt><kbd>{key}</kbd></dt><dd>{what}</dd></>)}</dl>
      <p class="quiet">The address carries the view: copy it to show somebody the same picture.</p>
      <button onClick={close}>Close</button>
    </Dialog>
  );
}
