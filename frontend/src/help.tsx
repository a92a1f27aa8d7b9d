const KEYS: [string, string][] = [
  ["1 – 5", "Map, site, attention, compare, findings"],
  ["/", "Search the model"],
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
    <div class="veil" onClick={close}>
      <div class="dialog" role="dialog" aria-label="Keys" onClick={(e) => e.stopPropagation()}>
        <h2>Keys</h2>
        <dl>{KEYS.map(([key, what]) => <><dt><kbd>{key}</kbd></dt><dd>{what}</dd></>)}</dl>
        <p class="quiet">The address carries the view: copy it to show somebody the same picture.</p>
        <button onClick={close}>Close</button>
      </div>
    </div>
  );
}
