"""A comparison as one HTML page that needs no other file: verdict, error along the depth, rows, worst elements."""

from __future__ import annotations

import json
import math

from torchtap.comparison.result import COMPARED, Comparison, FirstDifference, Row
from torchtap.comparison.table import number
from torchtap.sanitize import in_html

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ok: #2a8f4f; --bad: #d0342c; --odd: #b7791f; --dim: #8a8f98; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: .3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.verdict { font-size: 1.1rem; border-left: 4px solid var(--ok); padding: .6rem 1rem; background: #8881 }
.verdict.diverged { border-color: var(--bad) }
.small { color: var(--dim); font-size: .85rem }
table { border-collapse: collapse; width: 100%; font-size: .85rem }
th, td { text-align: right; padding: .15rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:nth-child(2), td:nth-child(2), td:last-child, th:last-child { text-align: left }
td.wrap { white-space: normal }
tr.diverged td { color: var(--bad) } tr.equal td { color: var(--dim) }
tr.compensated td, tr.odd td { color: var(--odd) } tr.first td { font-weight: 700 }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.scroll { overflow-x: auto }
"""

_COLOURS = {"diverged": "#d0342c", "compensated": "#b7791f", "equal": "#8a8f98"}


def page(result: Comparison) -> str:
    """The whole page."""
    state = "diverged" if result.first is not None else ""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>torchtap: {in_html(result.reference)} against {in_html(result.target)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{in_html(result.reference)} <span class='small'>against</span> {in_html(result.target)}</h1>",
        f"<p class='verdict {state}'>{in_html(result.verdict)}</p>",
        f"<p class='small'>{result.compared} sites compared; noise floor: {in_html(result.basis)}"
        + (f"; {result.forwards} forwards" if result.forwards else "")
        + "</p>",
        "<h2>Error along the depth of the model</h2>",
        _chart(result),
        _elements(result.first),
        "<h2>Sites</h2>",
        _rows(result),
        _listing("Could not be compared", [f"{u.site} ({u.side}): {u.why}" for u in result.unaligned]),
        _listing("Problems", list(result.problems)),
        f"<script type='application/json' id='data'>{_embedded(result)}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _embedded(result: Comparison) -> str:
    # "</script>" inside a name must not end the block.
    return json.dumps(json.loads(result.to_json())).replace("<", "\\u003c")


class _Axes:
    """Where a site and an error lie in the chart; errors have a logarithmic axis."""

    WIDTH, HEIGHT, LEFT, TOP = 1060, 320, 48, 10

    def __init__(self, rows: list[Row]) -> None:
        values = [v for row in rows for v in (row.error, row.floor) if 0 < v < math.inf]
        self.low = math.floor(math.log10(min(values))) if values else -8
        self.high = max(math.ceil(math.log10(max(values))) if values else 0, self.low + 1)
        self._sites = len(rows)

    def x(self, n: int) -> float:
        return self.LEFT + (self.WIDTH - self.LEFT - 10) * (n + 0.5) / self._sites

    def y(self, value: float) -> float:
        if value <= 0:
            level: float = self.low
        else:
            level = min(self.high, max(self.low, math.log10(value) if value < math.inf else self.high))
        return self.TOP + (self.HEIGHT - self.TOP - 24) * (self.high - level) / (self.high - self.low)


def _chart(result: Comparison) -> str:
    """Error and floor of each compared site on a logarithmic axis."""
    rows = [row for row in result.rows if row.status in COMPARED and not math.isnan(row.error)]
    if not rows:
        return ""
    axes = _Axes(rows)
    width, height, left = axes.WIDTH, axes.HEIGHT, axes.LEFT
    out = [f"<svg viewBox='0 0 {width} {height}' role='img' aria-label='error of each site'>"]
    for level in range(axes.low, axes.high + 1, max(1, (axes.high - axes.low) // 8)):
        at = axes.y(10.0**level)
        out.append(f"<line x1='{left}' y1='{at:.1f}' x2='{width}' y2='{at:.1f}' stroke='#8883'/>")
        out.append(f"<text x='4' y='{at + 4:.1f}'>1e{level}</text>")
    floor = " ".join(f"{axes.x(n):.1f},{axes.y(row.floor):.1f}" for n, row in enumerate(rows))
    out.append(f"<polyline points='{floor}' fill='none' stroke='#888' stroke-dasharray='4 3'/>")
    first = None if result.first is None else result.first.site
    out += [_dot(axes, n, row, row.site == first) for n, row in enumerate(rows)]
    out.append(f"<text x='{left}' y='{height - 4}'>{in_html(rows[0].site)}</text>")
    out.append(f"<text x='{width - 10}' y='{height - 4}' text-anchor='end'>{in_html(rows[-1].site)}</text>")
    out.append("</svg><p class='small'>Dots: relative L2 error. Dashed: noise floor.</p>")
    return "".join(out)


def _dot(axes: _Axes, n: int, row: Row, first: bool) -> str:
    """A site's error; the first that differs is larger and has a line through it."""
    colour = _COLOURS.get(row.status, "#2a8f4f")
    label = f"{row.site}: error {number(row.error)}, floor {number(row.floor)}, {row.status}"
    x = f"{axes.x(n):.1f}"
    dot = (
        f"<circle cx='{x}' cy='{axes.y(row.error):.1f}' r='{6 if first else 3}' fill='{colour}'>"
        f"<title>{in_html(label)}</title></circle>"
    )
    if not first:
        return dot
    return f"{dot}<line x1='{x}' y1='{axes.TOP}' x2='{x}' y2='{axes.HEIGHT - 20}' stroke='{colour}' opacity='.5'/>"


def _elements(first: FirstDifference | None) -> str:
    if first is None or first.where is None or not first.where.elements:
        return ""
    lines = "".join(
        f"<tr><td></td><td>[{', '.join(map(str, e.index))}]</td><td>{e.reference:.8g}</td><td>{e.target:.8g}</td>"
        f"<td>{e.target - e.reference:.3g}</td></tr>"
        for e in first.where.elements
    )
    return (
        f"<h2>Worst elements of {in_html(first.site)}</h2>"
        f"<p class='small'>The error is {in_html(str(first.where))}.</p>"
        "<div class='scroll'><table><tr><th></th><th>index</th><th>reference</th><th>target</th>"
        "<th>difference</th></tr>"
        f"{lines}</table></div>"
    )


def _rows(result: Comparison) -> str:
    head = (
        "#",
        "site",
        "error",
        "floor",
        "alone",
        "cosine",
        "SQNR dB",
        "max |diff|",
        "max ULP",
        "within",
        "status",
    )
    out = ["<div class='scroll'><table><tr>", *(f"<th>{each}</th>" for each in head), "</tr>"]
    for row in result.rows:
        first = result.first is not None and row.site == result.first.site
        kind = row.status if row.status in ("equal", "within", "diverged", "compensated") else "odd"
        out.append(f"<tr class='{kind}{' first' if first else ''}'>{_cells(row)}</tr>")
    out.append("</table></div>")
    return "".join(out)


def _cells(row: Row) -> str:
    m = row.measures
    name = row.site if row.site == row.target_site else f"{row.site} = {row.target_site}"
    status = row.status + (f", {row.origin}" if row.origin else "") + (f" ({row.note})" if row.note else "")
    numbers = (
        ["–"] * 5
        if m is None
        else [f"{m.cosine:.7f}", number(m.sqnr_db), number(m.max_abs), number(m.max_ulp), f"{m.within:.1%}"]
    )
    cells = [str(row.index), name, number(row.error), number(row.floor), number(row.local_error), *numbers]
    return "".join(f"<td>{in_html(cell)}</td>" for cell in cells) + f"<td class='wrap'>{in_html(status)}</td>"


def _listing(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    shown = "".join(f"<li>{in_html(line)}</li>" for line in lines[:200])
    more = f"<li>... and {len(lines) - 200} more</li>" if len(lines) > 200 else ""
    return f"<h2>{title}</h2><ul class='small'>{shown}{more}</ul>"
