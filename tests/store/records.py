"""Records made up for the tests of the store and the sinks; needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

SITES = ("encoder:output", "decoder:output", "decoder.norm:param.weight")
STATISTICS = ("mean", "std", "max")


def number(step: int, site: int, statistic: int) -> float:
    """What the made-up grid holds at one place."""
    return step + site / 10 + statistic / 100


def grid(step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([[number(step, site, kind) for kind in range(3)] for site in range(3)])


def image(step: int, size: int = 64) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The made-up tensor of a step."""
    return np.random.default_rng(step).standard_normal((size, 4), dtype=np.float32)


def record(step: int, *, tensors: int = 0, size: int = 64, **clock: Any) -> StepRecord:
    """One step with three sites by three statistics and, if asked, tensors of the first site."""
    items = tuple(
        TensorItem(SITES[0], f"value{index}" if index else "value", "full", image(step + index, size))  # type: ignore[arg-type]
        for index in range(tensors)
    )
    known = {"epoch": None, "batch": None, "phase": "train", "time": 1000.0 + step, **clock}
    return StepRecord(step, scalars=(ScalarBlock(SITES, STATISTICS, grid(step)),), tensors=items, **known)
