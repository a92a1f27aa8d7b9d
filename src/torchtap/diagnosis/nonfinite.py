"""Where the first NaN or infinity came from.

The earliest step that has one, and at that step the earliest site in the order in which a training step
computes: parameters are there before the forward, then the forward in execution order, then the backward in
the reverse of it, parameters' gradients last.

An infinity that a site always holds (an attention mask) is by design and not reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.grid import Grid, Place, grid

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["computed_order", "first_nonfinite"]

_STAGE = {"param": 0, "input": 1, "output": 1, "attention": 1, "value": 1}
_STAGE |= {"grad_output": 2, "grad_input": 2, "param_grad": 3, "buffer": 4}


def computed_order(place: Place) -> tuple[int, int]:
    """Sorts sites by when a training step computes them."""
    stage = _STAGE.get(place.kind, 1)
    return stage, -place.index if stage in (2, 3) else place.index


def _by_design(infinities: Grid, nan_sites: set[str], by_name: dict[str, Place]) -> set[str]:
    masks = set()
    for row, site in enumerate(infinities.sites):
        counts = infinities.values[row]
        seen = counts[~np.isnan(counts)]
        kind = by_name[site].kind
        always = len(seen) > 0 and bool((seen > 0).all())
        if always and kind in ("input", "attention", "value", "buffer") and site not in nan_sites:
            masks.add(site)
    return masks


def first_nonfinite(run: Run, all_places: list[Place]) -> list[Finding]:
    """One finding for the origin, naming every site that it spread to; none if all numbers are finite."""
    by_name = {place.name: place for place in all_places}
    names = [place.name for place in all_places]
    nans, infinities = grid(run, "nans", names), grid(run, "infs", names)
    nan_sites = {s for s, row in zip(nans.sites, nans.values, strict=True) if (row > 0).any()}
    masks = _by_design(infinities, nan_sites, by_name)
    first: dict[str, tuple[int, float, str]] = {}  # site -> step, how many, what
    for found, word in ((nans, "NaN"), (infinities, "inf")):
        for row, site in enumerate(found.sites):
            hits = np.flatnonzero(found.values[row] > 0)
            if site in masks or not len(hits):
                continue
            step, count = int(found.steps[hits[0]]), float(found.values[row, hits[0]])
            if site not in first or step < first[site][0]:
                first[site] = (step, count, word)
    if not first:
        return []
    order = sorted(first, key=lambda site: (first[site][0], computed_order(by_name[site])))
    origin = order[0]
    step, count, word = first[origin]
    others = len(order) - 1
    spread = f"; {others} more site{'s' if others > 1 else ''} had one afterwards" if others else ""
    article = "an" if word == "inf" else "a"
    return [
        Finding(
            "nonfinite",
            "error",
            origin,
            step,
            count,
            f"the first value that is not a finite number is {article} {word} at {origin}, step {step} "
            f"({count:,.0f} of them){spread}",
            "Look at this site's inputs at that step: everything before it in the step was finite.",
            tuple(order),
        )
    ]
