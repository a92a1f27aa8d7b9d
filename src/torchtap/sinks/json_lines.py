"""One line of JSON for each step, for tools that read logs.

``{"step": 3, "epoch": null, "batch": 0, "phase": "train", "time": ..., "values": {site: {statistic: number}},
"tensors": [{"site", "field", "reduction", "shape", "dtype"}]}``. JSON has no word for what is not finite: such a number
is the text ``"nan"``, ``"inf"`` or ``"-inf"``. Tensors are named, not written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from torchtap.plan.sites import Selectable
from torchtap.sinks.choice import Choice
from torchtap.store.record import StepRecord

__all__ = ["JsonLinesSink"]


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
