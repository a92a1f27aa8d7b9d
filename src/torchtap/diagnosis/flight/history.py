"""What was usual in a training: the ring of its last records, and numbers against their own history."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import final

from torchtap.store.record import ScalarBlock, StepRecord

__all__ = ["Ring", "Usual"]

_LEAST = 20  # numbers before anything counts as unusual
_AS_SIGMA = 1.4826  # the median deviation of a normal distribution, as its standard deviation
_LEAST_SPREAD = (
    0.05  # of the median: a training that repeats itself exactly is not unusual at the first change
)


@final
class Ring:
    """A sink that keeps the numbers of the last steps in memory, and no tensors."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._records: deque[StepRecord] = deque()

    def write(self, record: StepRecord) -> None:
        """Take one step. An evaluation is of the step that it follows, and stays as long."""
        self._records.append(record)
        while self._records[0].step <= record.step - self._steps:
            self._records.popleft()

    def close(self) -> None:
        """Nothing to do."""

    @property
    def records(self) -> list[StepRecord]:
        """The oldest first."""
        return list(self._records)

    @property
    def nbytes(self) -> int:
        """What the numbers take."""
        return sum(block.values.nbytes for record in self._records for block in record.scalars)


@final
class Usual:
    """Says whether a number is far above its own history: the median and ``k`` times the spread around it."""

    def __init__(self, k: float, steps: int) -> None:
        self._k = k
        self._seen: deque[float] = deque(maxlen=steps)

    def limit(self) -> float:
        """Where unusual begins; infinity as long as too little was seen."""
        if len(self._seen) < _LEAST:
            return math.inf
        middle = statistics.median(self._seen)
        spread = statistics.median(abs(each - middle) for each in self._seen)
        return middle + self._k * max(_AS_SIGMA * spread, _LEAST_SPREAD * abs(middle))

    def judge(self, value: float) -> float | None:
        """The limit that the value is beyond, or None. A usual value becomes part of the history."""
        limit = self.limit()
        if math.isfinite(value):
            if value > limit:
                return limit
            self._seen.append(value)
        return None


def rows_with(block: ScalarBlock, *names: str) -> dict[str, float]:
    """The sites at which any of these statistics is above zero, with their sum."""
    columns = [block.statistics.index(name) for name in names if name in block.statistics]
    totals = block.values[:, columns].sum(axis=1)
    return {
        block.sites[row]: float(totals[row])
        for row in (totals > 0).nonzero()[0]
        if block.present is None or block.present[row]
    }
