"""Keep the last records in memory, to look at them in the same process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import numpy as np

from torchtap.errors import SelectionError
from torchtap.store.read.results import Series
from torchtap.store.record import StepRecord

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MemorySink"]


@final
class MemorySink:
    """The last ``last`` records; all of them with ``last=None``, and then memory grows with the training."""

    def __init__(self, last: int | None = 1000) -> None:
        self.records: deque[StepRecord] = deque(maxlen=last)
        self.closed = False

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True

    def series(self, site: str, statistic: str) -> Series:
        """One number over the steps that are kept."""
        steps: list[int] = []
        values: list[float] = []
        for record in self.records:
            for block in record.scalars:
                if site in block.sites and statistic in block.statistics:
                    row = block.sites.index(site)
                    if block.present is None or block.present[row]:
                        steps.append(record.step)
                        values.append(float(block.values[row, block.statistics.index(statistic)]))
        if not steps:
            raise SelectionError(
                f"none of the {len(self.records)} kept records has {statistic!r} of {site!r}"
            )
        return Series(np.array(steps, np.int64), np.array(values))

    def tensor(self, site: str, step: int | None = None, field: str = "value") -> Tensor:
        """A kept tensor; without ``step`` the last one."""
        for record in reversed(self.records):
            if step is None or record.step == step:
                for item in record.tensors:
                    if item.site == site and item.field == field:
                        return item.value
        at = "" if step is None else f" at step {step}"
        raise SelectionError(f"none of the {len(self.records)} kept records has {field!r} of {site!r}{at}")
