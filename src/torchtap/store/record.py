"""What one step hands to the run and to every sink: plain frozen data, already on the host.

This is the seam between a session, which makes records, and everything that keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # readers use this module in processes that never import torch
    from torch import Tensor

__all__ = ["Consumer", "ScalarBlock", "StepRecord", "TensorItem"]


@dataclass(frozen=True, slots=True, eq=False)
class ScalarBlock:
    """Numbers of one step as a grid, sites by statistics.

    ``sites`` and ``statistics`` are the same tuple objects from step to step as long as the grid has the same
    shape, so that a consumer may cache what it derives from them by identity.
    """

    sites: tuple[str, ...]
    statistics: tuple[str, ...]
    values: npt.NDArray[np.float64]  # (sites, statistics)
    present: npt.NDArray[np.bool_] | None = None  # (sites,); None when every site arrived


@dataclass(frozen=True, slots=True, eq=False)
class TensorItem:
    """One tensor of one step. Its memory belongs to the record: nobody changes it any more."""

    site: str
    field: str  # "value" for a full tensor; "counts", "edges", "gram" ... for other reductions
    reduction: str  # the reduction's name
    value: Tensor  # on the CPU, any layout or dtype


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Everything that was kept at one step in one phase."""

    step: int
    epoch: int | None
    batch: int | None
    phase: str  # "train", "eval" or what the user named; passes of other phases have records of their own
    time: float  # seconds since the Unix epoch, at the end of the step
    scalars: tuple[ScalarBlock, ...]
    tensors: tuple[TensorItem, ...]
    passes: int = 1  # calls of the model that were folded together
    skipped: bool = False  # a gradient scaler left the update out


@runtime_checkable
class Consumer(Protocol):
    """Whatever takes records: the run's writer and every sink."""

    def write(self, record: StepRecord) -> None:
        """Take one step."""

    def close(self) -> None:
        """Flush and let go. Called once."""
