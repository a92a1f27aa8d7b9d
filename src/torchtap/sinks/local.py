"""Keep records in this process or in a text file: call a function, keep the last ones, write JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from torchtap.errors import SelectionError
from torchtap.plan.sites import Selectable
from torchtap.sinks.selection import Choice
from torchtap.spi import StepRecord
from torchtap.store.read.results import Series

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CallbackSink", "JsonLinesSink", "MemorySink"]


@final
class CallbackSink:
    """``function(record)`` at the end of each live step, in the training's thread; ``on_close()`` at the end."""

    def __init__(
        self, function: Callable[[StepRecord], object], on_close: Callable[[], object] | None = None
    ) -> None:
        self._function = function
        self._on_close = on_close

    def write(self, record: StepRecord) -> None:
        self._function(record)

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()


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


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@final
class JsonLinesSink:
    """Append a line to ``path`` for each record; ``sites`` and ``statistics`` narrow down what is in it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sites: Selectable | Sequence[Selectable] | None = None,
        statistics: Sequence[str] | None = None,
    ) -> None:
        self._choice = Choice(sites, statistics)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed by close()

    def write(self, record: StepRecord) -> None:
        values: dict[str, dict[str, float | str]] = {}
        for block in record.scalars:
            columns = self._choice.takes_of(block.statistics)
            for row, site in enumerate(block.sites):
                if (block.present is None or block.present[row]) and self._choice.takes(site):
                    numbers = block.values[row].tolist()
                    values.setdefault(site, {}).update(
                        (name, _number(numbers[column])) for column, name in columns
                    )
        line: dict[str, object] = {
            "step": record.step,
            "epoch": record.epoch,
            "batch": record.batch,
            "phase": record.phase,
            "time": record.time,
            "values": values,
            "tensors": [
                {
                    "site": item.site,
                    "field": item.field,
                    "reduction": item.reduction,
                    "shape": list(item.value.shape),
                    "dtype": str(item.value.dtype).removeprefix("torch."),
                }
                for item in self._choice.tensors(record)
            ],
        }
        # one call for the whole line, so that a reader of the growing file sees whole lines
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """A finding, as a line of its own."""
        line = {"alert": level, "title": title, "text": text, "step": step, "site": site}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._choice.tell_what_never_came("JsonLinesSink")
        self._file.close()
