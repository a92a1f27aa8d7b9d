"""A kept step run again in another process: from the file of the moment and a model of the same kind.

The weights go into the model that is given; the run's recorded values of the replay are what the new ones are held
against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from torch import nn

from torchtap.diagnosis.birth import Birth
from torchtap.diagnosis.flight.arithmetic import with_arithmetic
from torchtap.diagnosis.flight.dump import REPLAYED, explain, reproduce, same_bits
from torchtap.diagnosis.flight.moment import StepSnapshot
from torchtap.diagnosis.op_trail import Event
from torchtap.errors import RunError
from torchtap.plan.tap import tap
from torchtap.reduce import Full, Stats
from torchtap.sinks.local import MemorySink
from torchtap.store.read.reader import open_run

__all__ = ["Offline", "offline"]


@final
@dataclass(slots=True)
class Offline:
    """What came of it."""

    step: int
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    birth: Birth | None = None
    error: Exception | None = None

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        return {
            "step": self.step,
            "compared": self.compared,
            "differing": self.differing,
            "birth": None if self.birth is None else self.birth.to_dict(),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }


def offline(
    run: str | os.PathLike[str],
    moment: StepSnapshot,
    models: Mapping[str, nn.Module],
    *,
    out: str | None = None,
    on_birth: Callable[[Event], None] | None = None,
) -> Offline:
    """Run a moment's step with these models; compare it with what the dump ``run`` holds of it."""
    if not moment.weights or not moment.passes:
        raise RunError(
            f"{run} keeps no weights or no call of the model for step {moment.step}: it holds the numbers of the last "
            f"steps only. {'; '.join(moment.notes)}"
        )
    moment.load_weights(models)
    with with_arithmetic(moment.arithmetic):
        return _replayed(run, moment, models, out, on_birth)


def _replayed(
    run: str | os.PathLike[str],
    moment: StepSnapshot,
    models: Mapping[str, nn.Module],
    out: str | None,
    on_birth: Callable[[Event], None] | None,
) -> Offline:
    outcome = Offline(moment.step, birth=explain(models, moment, on_birth))
    taps, sink = [tap(REPLAYED, Full()), tap(REPLAYED, Stats())], MemorySink()
    outcome.error = reproduce(models, moment, taps, [sink]).error
    if out is not None:  # by itself: a run's writer uses the memory of tensors again once they are on disk
        reproduce(models, moment, taps, [], run=out)
    recorded = open_run(run, partial=True)
    known = {
        ref.site
        for ref in recorded.tensors(phase="replay")
        if ref.step == moment.step and ref.field == "value"
    }
    for item in (item for record in sink.records for item in record.tensors if item.site in known):
        outcome.compared += 1
        if not same_bits(recorded.tensor(item.site, step=moment.step, phase="replay"), item.value):
            outcome.differing.append(item.site)
    return outcome
