// Choosing what a view is about: a kind of site, and one of its statistics.

import { adjust } from "../route";
import { kindWord, statisticWord } from "../words";

interface Props { kinds: string[]; kind: string; names: string[]; statistic: string }

export const KindAndStatistic = ({ kinds, kind, names, statistic }: Props) => (
  <>
    <label>Show
      <select aria-label="Kind" value={kind || "all"} onChange={(e) => adjust({ kind: e.currentTarget.value, statistic: null })}>
        {kinds.map((k) => <option key={k} value={k}>{kindWord(k)}</option>)}
        {kinds.length > 1 && <option value="all">Everything</option>}
      </select>
    </label>
    <label>by
      <select aria-label="Statistic" value={statistic} onChange={(e) => adjust({ statistic: e.currentTarget.value })}>
        {names.map((n) => <option key={n} value={n}>{statisticWord(n)}</option>)}
      </select>
    </label>
  </>
);
