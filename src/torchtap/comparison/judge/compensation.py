"""Faults that do not leave the module around them: whether they truly cancel out, or are only too small to be seen.

A module around a fault may return the right thing for three reasons. The difference is undone further on (a norm
folded into a convolution, a batch flipped and flipped back). The arithmetic does not depend on it (a key's bias
before a softmax). Or the fault is real and drowns in the rest (a residual, 16-bit rounding, a dead unit). The first
two are harmless, the third is not. They are told apart by running the target again with a share of the difference:

    half of it    wrong, although none of it and all of it are right: it is undone further on. Harmless
    8 times it    wrong, or the opposite of what -8 times it gives: the fault is real and was only too small
                  else the arithmetic does not depend on it, and what is seen is rounding. Harmless
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtap.comparison.judge.result import Row
from torchtap.comparison.judge.status import status_of
from torchtap.comparison.live.evidence import PassEvidence, heal
from torchtap.comparison.live.passes import TraceProbe
from torchtap.comparison.measure.measures import Measures
from torchtap.plan.names import paths_around

__all__ = ["around", "cancels", "right_modules"]

_MORE = 8.0
_ALIKE = 1.5  # how far two answers in proportion may be apart in size


def right_modules(found: PassEvidence, rows: Sequence[Row]) -> set[str]:
    """Modules whose outputs all agree in the free pass, with a number among them: indices may agree where what they
    were chosen by does not."""
    outputs: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == "output":
            outputs.setdefault(row.module, []).append(row)
    return {
        module
        for module, borders in outputs.items()
        if all(row.status in ("equal", "within") for row in borders)
        and any(_is_number(found, row.site) for row in borders)
    }


def around(author: str | None, itself: bool) -> list[str]:
    """The modules around a module, the smallest first and the model last; ``itself`` counts it as well."""
    if author is None:
        return [""]
    return [author, *paths_around(author)] if itself else list(paths_around(author))


def cancels(found: PassEvidence, module: str, sites: set[str]) -> bool:
    """Whether the differences at these sites, all inside a module that returns the right thing, are harmless."""
    borders = [e.site for e in found.trace.events if e.module == module and e.kind == "output"]
    try:
        if _wrong(found, borders, heal(found, sites, 0.0)) or _wrong(found, borders, heal(found, sites, 0.5)):
            return True
        more, less = heal(found, sites, _MORE), heal(found, sites, -_MORE)
        if _wrong(found, borders, more) or _wrong(found, borders, less):
            return False
        return not any(_opposite(more.measures.get(site), less.measures.get(site)) for site in borders)
    except Exception:  # a target that does not run on such values says nothing; the free pass decides
        return True


def _wrong(found: PassEvidence, borders: Iterable[str], after: TraceProbe) -> bool:
    return any(
        site in after.measures and status_of(after.measures[site], found.floors.free[site])[0] == "diverged"
        for site in borders
    )


def _opposite(more: Measures | None, less: Measures | None) -> bool:
    """Whether two differences are each other's opposite, as far as their size and their largest element tell: an answer
    in proportion, which rounding is not."""
    if more is None or less is None or not more.worst or more.worst != less.worst:
        return False
    up, down = more.worst_target - more.worst_reference, less.worst_target - less.worst_reference
    return up * down < 0.0 and _alike(abs(up), abs(down)) and _alike(more.rel_l2, less.rel_l2)


def _alike(one: float, other: float) -> bool:
    return 0.0 < max(one, other) <= _ALIKE * min(one, other)


def _is_number(found: PassEvidence, site: str) -> bool:
    return found.trace.values[site].is_floating_point() or found.trace.values[site].is_complex()
