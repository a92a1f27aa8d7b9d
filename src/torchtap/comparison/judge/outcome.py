"""From rows to one of three outcomes: same, differs, cannot tell. What was not compared is evidence too.

"Same" is said only when nothing is left that could be otherwise:
- the results of the model were compared and agree, or every site was;
- nothing was unreadable, of another shape, or NaN everywhere;
- of a value in unknown parts on ranks, what it leads to agrees;
- a site that only one side has lies inside a module whose output was compared and agrees;
- of recordings: every step is in both, neither is known to be damaged, and half of the sites were compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtap.comparison.align.pairing import Unaligned
from torchtap.comparison.judge.result import AGREES, FirstDifference, Outcome, Row
from torchtap.comparison.judge.words import cannot_tell, counted, differs, same
from torchtap.plan.names import paths_around, read_name

__all__ = ["decide", "doubts"]

_LEAST_COVERAGE = 0.5
_NOT_COMPARED = {
    "unreadable": "cannot be read",
    "other shape": "with another shape",
    "not comparable": "cannot be compared",
}
_FORWARD = ("input", "output", "attention", "value")


def decide(
    first: FirstDifference | None,
    rows: Sequence[Row],
    unaligned: Sequence[Unaligned],
    *,
    live: bool,
    further: Sequence[str] = (),
    also: str = "",
) -> tuple[Outcome, str]:
    """The outcome and its sentence. ``further`` are reasons from outside the rows that forbid "same"."""
    total = len(rows) + sum(each.side != "rule" for each in unaligned)
    if first is not None:
        return "differs", differs(first, rows, total, first.where)
    why = [*doubts(rows, unaligned, live=live), *further]
    if why:
        return "cannot tell", cannot_tell(rows, total, why)
    return "same", same(rows, total, also)


def doubts(rows: Sequence[Row], unaligned: Sequence[Unaligned], *, live: bool) -> list[str]:
    """Reasons why agreement of what was compared is not enough."""
    alone = [each for each in unaligned if each.side != "rule"]
    return [
        *([] if live and _results(rows) else _not_compared(rows)),
        *_in_parts(rows),
        *_one_sided(rows, alone),
        *_too_few(rows, len(rows) + len(alone), live=live),
    ]


def _not_compared(rows: Sequence[Row]) -> Iterator[str]:
    for status, text in _NOT_COMPARED.items():
        hit = [row for row in rows if row.status == status]
        if hit:
            note = f" ({hit[0].note})" if hit[0].note else ""
            yield f"{counted(len(hit), 'site')} {text}, first {hit[0].site}{note}"


def _in_parts(rows: Sequence[Row]) -> Iterator[str]:
    parts = [row for row in rows if row.status == "unknown part" and not _made_good(row, rows)]
    if parts:
        first = parts[0]
        yield f"{counted(len(parts), 'site')} of which parts lie on ranks, first {first.site} ({first.note})"


def _one_sided(rows: Sequence[Row], alone: Sequence[Unaligned]) -> Iterator[str]:
    outputs = [row for row in rows if row.kind == "output"]
    agree = {row.module for row in outputs if row.status in AGREES}
    agree -= {row.module for row in outputs if row.status not in AGREES}
    missing = [*(row.site for row in rows if row.status == "missing"), *(each.site for each in alone)]
    open_ = [site for site in missing if not _inside(site, agree)]
    if open_:
        yield f"{counted(len(open_), 'site')} in one of them alone, first {open_[0]}"


def _too_few(rows: Sequence[Row], total: int, *, live: bool) -> Iterator[str]:
    compared = sum(row.status in AGREES for row in rows)
    if not compared:
        yield "nothing at all could be compared"
    elif not live and compared < _LEAST_COVERAGE * total:
        yield f"{compared} of {total} sites are too few"


def _results(rows: Sequence[Row]) -> bool:
    """Whether the model's own results were compared and agree."""
    results = [row for row in rows if row.module == "" and row.kind == "output"]
    return bool(results) and all(row.status in AGREES for row in results)


def _made_good(row: Row, rows: Sequence[Row]) -> bool:
    """Whether what could not be compared could only have mattered through something that agrees: a module's gradient
    through those of its parameters, a value through the output of a module around it."""
    if row.kind in _FORWARD:
        around = {row.module, *paths_around(row.module)}
        outer = [each for each in rows if each.kind == "output" and each.module in around and each is not row]
    else:
        outer = [each for each in rows if each.kind == "param_grad" and each.module == row.module]
    return any(each.status in AGREES for each in outer) and all(each.status != "diverged" for each in outer)


def _inside(site: str, agree: set[str]) -> bool:
    """Whether a site's value could only have mattered through a module that agrees."""
    name = read_name(site)
    if name.kind not in _FORWARD:
        return False
    return name.path in agree or any(outer in agree for outer in paths_around(name.path))
