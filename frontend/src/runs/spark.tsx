// A loss in the space of a word. A gap is a step without a finite value.

export function Spark({ values, broken }: { values: (number | null)[]; broken: boolean }) {
  const there = values.filter((v): v is number => v !== null);
  if (there.length === 0) return <svg class="spark" width="90" height="20" role="img" aria-label="no finite value" />;
  const low = Math.min(...there);
  const span = Math.max(...there) - low || 1;
  let path = "";
  let joined = false;
  values.forEach((v, i) => {
    if (v !== null) path += `${joined ? "L" : "M"}${(1 + (i / Math.max(1, values.length - 1)) * 88).toFixed(1)} ${(18 - ((v - low) / span) * 16).toFixed(1)}`;
    joined = v !== null;
  });
  return (
    <svg class="spark" width="90" height="20" role="img" aria-label={broken ? "loss over time, with NaN" : "loss over time"}>
      <path d={path} />
      {broken && values[values.length - 1] !== null && <text x="89" y="12" text-anchor="end">NaN</text>}
    </svg>
  );
}
