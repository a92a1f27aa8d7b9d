"""Whether a training gets anywhere: its loss against that of its first steps."""

from __future__ import annotations

import numpy as np

from torchtap.diagnosis.chart import Chart

__all__ = ["LOSS", "has_improved"]

LOSS = ":value.loss"
_FEW = 8  # records that a loss is averaged over


def has_improved(chart: Chart, step: int, share: float = 0.75) -> bool:
    """Whether, by a step, the loss had fallen to less than a share of what it was at first. Unknown is no."""
    steps, loss = chart.series(LOSS)
    loss = loss[steps <= step]
    if len(loss) < 2 * _FEW:
        return False
    first, last = float(np.median(loss[:_FEW])), float(np.median(loss[-_FEW:]))
    return first > 0 and last < share * first
