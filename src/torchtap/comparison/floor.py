"""How much two right computations may differ: the noise floor of each site, found without any tolerance.

A floor is learnt from differences that are known to be harmless, and is as large as the largest of them:

``repeat``     the reference run again on the same inputs: what its own kernels do not reproduce
``one ULP``    the reference with values moved by one unit in the last place: what rounding alone can do here
``float64``    the reference against itself in float64: how much rounding its own arithmetic already has
``golden``     a high-precision recording that the user gave, against the reference
``same dtype`` the reference in the target's lower precision, against the reference
``quantizer's step``  the reference with its weights rounded as the target's are, against the reference
``default``    nothing of these: what rounding does in a computation of that dtype as a rule

A site *diverges* when its error is more than ``margin`` times its floor. Error and floor are taken twice, as
relative L2 (errors that are everywhere) and relative L-infinity (errors in one place), and either may decide.
Integers and booleans have no rounding: there the share of unequal elements stands for both.

Not here: which site is to blame (`verdict`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torchtap.comparison.measures import Measures
from torchtap.comparison.values import DType, coarser, resolution

__all__ = ["NO_FLOOR", "Floor", "default_floor", "floor_from"]

# An error has to stand out by this factor from what is known to be harmless. Two right kernels that sum in a
# different order were seen up to 4 times as far apart as each is from the exact result.
MARGIN = 8.0
# In 16 bits every result is rounded once more when it is stored, by the same amount in every right computation: the
# floor is mostly that, and what is over it stands out sooner. So it is with a quantizer's step.
MARGIN_16_BIT = 3.0
# A default knows nothing of the computation but its dtype. Sums of 16-bit values are kept in 32 bits, so that
# their results are off by a few units; sums of 32-bit values are not, and their error grows with their length.
DEFAULT_L2 = {"wide": 16.0, "narrow": 4.0}
DEFAULT_LINF = 4.0  # times the above: how far the largest element may stand out
# No estimate is below this share of a dtype's resolution: the last digit of a result is never certain.
LEAST = 0.5


@final
@dataclass(frozen=True, slots=True)
class Floor:
    """The largest harmless difference of one site, and where that knowledge comes from."""

    l2: float
    linf: float
    sources: tuple[str, ...]
    margin: float = MARGIN

    def excess(self, measures: Measures) -> float:
        """Error as a multiple of what is still allowed: above 1 the site diverges."""
        if measures.masks_differ:
            return math.inf
        return max(
            _over(measures.rel_l2, self.l2 * self.margin), _over(measures.rel_linf, self.linf * self.margin)
        )


NO_FLOOR = Floor(0.0, 0.0, ())


def _over(error: float, allowed: float) -> float:
    if not error > 0.0:  # zero, or nothing finite to measure
        return 0.0
    return error / allowed if allowed > 0.0 else math.inf


def default_floor(reference: DType, target: DType) -> Floor:
    """The floor when nothing but the dtypes is known."""
    step = resolution(coarser(reference, target))
    allowed = step * DEFAULT_L2["narrow" if step > 1e-4 else "wide"]
    sources = (f"default for {coarser(reference, target)}",)
    return Floor(allowed / MARGIN, DEFAULT_LINF * allowed / MARGIN, sources)


def floor_from(
    harmless: Iterable[tuple[str, Measures | None]], reference: DType, target: DType
) -> Floor | None:
    """The floor that harmless differences of one site amount to; ``None`` when there is none to learn from."""
    least = LEAST * resolution(coarser(reference, target))
    l2, linf = least, least
    sources: list[str] = []
    for source, measures in harmless:
        if measures is None or measures.nothing_finite:
            continue
        sources.append(source)
        # A place that is not finite in one of two right runs is unstable; nothing can be learnt from its size.
        l2 = max(l2, _finite(measures.rel_l2))
        linf = max(linf, _finite(measures.rel_linf))
    if not sources:
        return None
    narrow = resolution(coarser(reference, target)) > 1e-4 or "quantizer's step" in sources
    return Floor(l2, linf, tuple(sources), MARGIN_16_BIT if narrow else MARGIN)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
