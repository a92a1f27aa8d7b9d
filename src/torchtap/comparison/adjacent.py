"""How much each layer changes its input: the distance of each layer's output from the one before it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

from torchtap.comparison.given import recording_of
from torchtap.comparison.measure.measures import Measures, measure
from torchtap.comparison.recorded.recordings import Recording

__all__ = ["LayerChange", "layer_changes"]


@final
@dataclass(frozen=True, slots=True)
class LayerChange:
    """From one layer's output to the next."""

    before: str
    after: str
    measures: Measures | None  # None when the shapes differ
    note: str = ""

    @property
    def relative(self) -> float:
        """The size of the change relative to what came in; NaN when it has none."""
        return float("nan") if self.measures is None else self.measures.rel_l2


def layer_changes(
    source: object, sites: list[str] | None = None, *, step: int | None = None
) -> list[LayerChange]:
    """Compare each layer with the one before it.

    ``source`` is whatever `torchtap.compare` takes as a recording; ``sites`` picks and orders the layers when it
    holds more than them.
    """
    recording: Recording = recording_of(source)
    at = recording.steps()[-1] if step is None else step
    names = sites or [site.name for site in recording.sites(at)]
    changes = []
    value = recording.value(names[0], at) if names else None
    for before, after in pairwise(names):
        following = recording.value(after, at)
        if value is None or following is None:
            changes.append(LayerChange(before, after, None, "only statistics were kept"))
        elif value.shape != following.shape:
            changes.append(
                LayerChange(
                    before, after, None, f"shapes differ: {tuple(value.shape)}, {tuple(following.shape)}"
                )
            )
        else:
            changes.append(LayerChange(before, after, measure(value, following)))
        value = following
    return changes
