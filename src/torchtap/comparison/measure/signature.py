"""A few numbers of a value by which two sites are known to hold the same one, whatever their names."""

from __future__ import annotations

import math

import numpy as np

from torchtap.comparison.measure.values import Comparable, value_of

__all__ = ["signature"]

_ELEMENTS = 1 << 20  # of a larger value so many, evenly spaced, stand for all


def signature(value: Comparable) -> tuple[float, ...] | None:
    """``(size, three weighted sums)``, all on one scale; ``None`` for what has no finite elements or is constant.

    The weights differ from place to place, so that the same elements in another order have another signature.
    """
    flat = value_of(value).real().reshape(-1)
    if flat.size > _ELEMENTS:
        flat = flat[:: flat.size // _ELEMENTS]
    wide = flat.astype(np.float64)
    wide = np.where(np.isfinite(wide) & (np.abs(wide) < 1e29), wide, 0.0)
    size = float(np.linalg.norm(wide))
    if not 0.0 < size < math.inf or wide.size < 2 or bool((wide == wide[0]).all()):
        return None
    place = np.arange(1, wide.size + 1, dtype=np.float64)
    sums = (float((wide * np.sin(place * rate)).sum()) for rate in (1.0, 0.1, 0.01))
    return (size, *sums)
