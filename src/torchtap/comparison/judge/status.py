"""A site's status from its measures and its floor."""

from __future__ import annotations

from torchtap.comparison.judge.result import Status
from torchtap.comparison.measure.floor import Floor
from torchtap.comparison.measure.measures import Measures

__all__ = ["note_of", "status_of"]


def status_of(measures: Measures, floor: Floor) -> tuple[Status, float]:
    """A site's status and its excess over the floor."""
    if measures.nothing_finite and not measures.masks_differ and max(measures.nans):
        return "not comparable", 0.0
    if measures.identical:
        return "equal", 0.0
    excess = floor.excess(measures)
    return ("diverged" if excess > 1.0 else "within"), excess


def note_of(measures: Measures) -> str:
    """What is odd about the values themselves."""
    if measures.masks_differ:
        sides = [
            f"{sum(pair)} in the {side}"
            for side, pair in zip(
                ("reference", "target"), zip(measures.nans, measures.infs, strict=True), strict=True
            )
        ]
        places = "1 place" if measures.masks_differ == 1 else f"{measures.masks_differ} places"
        return f"NaN or infinite in {places} of one side alone ({', '.join(sides)})"
    unfinite = measures.count - measures.compared
    if measures.nothing_finite and max(measures.nans):
        return "NaN or infinite everywhere in both"
    return f"{unfinite} places are not finite in both" if unfinite else ""
