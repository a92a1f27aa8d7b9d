"""Check a recording while it is made: what the training did against what was recorded of it.

The training's side is counted at the hooks, before the tracker sees an event: updates, passes, numbers, backward calls
through passes, and between which updates each happened. The other side are the tracker's decisions and the records.
Every run checks:
- updates seen are updates recorded, each once and in order, and no parameter twice in a step;
- every pass, number and state belongs to one step, and to one that the updates around it allow;
- a pass that a backward ran through is training, one without gradients is not;
- no step and phase occurs twice in a series, and steps only grow;
- ``param`` is what the optimizer found, and param(n) + update(n) is param(n+1), by the mean of each parameter.

Nothing of the model is copied: a mean of the smallest recorded parameter is taken at each recorded update on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap.plan.plan import Plan
from torchtap.schedule.base import Moment
from torchtap.session.tracker import Update
from torchtap.store.record import ScalarBlock, StepRecord

__all__ = ["Audit"]

_MOST = 20  # violations that are reported
_REMEMBERED = 10_000  # units
_SMALL = 4096  # elements of a parameter whose mean is taken


@final
@dataclass(slots=True)
class _Noted:
    """A unit as the hooks saw it."""

    kind: str  # pass, log or state
    after: int  # updates that had been seen
    mark: int | None  # the step that the user had marked
    grad: bool = False
    named: bool = False
    times: int = 1
    backward: bool = False


@final
class Audit:
    """Count on both sides, and compare."""

    def __init__(self) -> None:
        self.records = 0
        self.updates = 0  # seen at the optimizers' hooks
        self.violations: list[str] = []
        self._recorded = 0  # updates
        self._units: dict[int, _Noted] = {}
        self._open: dict[int, list[tuple[_Noted, Moment]]] = {}  # assigned to steps that were not left
        self.mark: int | None = None  # the step that the user has begun
        self._placed: set[int] = set()  # units that were assigned or dropped
        self._newest: tuple[int, dict[str, list[ScalarBlock]]] = (-1, {})  # a step, and its blocks by phase
        self._params: dict[str, tuple[int, float, float]] = {}  # site -> step, expected mean, largest update
        self._reads_parameters = False
        self._smallest: tuple[tuple[int, int], tuple[str, Tensor] | None] | None = None  # by optimizer
        self._means: dict[int, tuple[str, float]] = {}  # by update: a site, and its mean before
        self._moved: set[int] = set()  # updates before which something else has changed parameters
        self._counts = [0, 0]  # passes and numbers

    def _fail(self, message: str) -> None:
        if message not in self.violations and len(self.violations) < _MOST:
            self.violations.append(message)

    # -- the training's side ------------------------------------------------------------------------------

    def note(self, kind: str, unit: int, *, grad: bool = False, named: bool = False) -> None:
        """Values or numbers are put into a unit now."""
        self._counts[kind == "log"] += kind != "state"
        known = self._units.get(unit)
        if known is not None:
            known.times += 1
        elif unit not in self._placed:
            self._units[unit] = _Noted(kind, self.updates, self.mark, grad, named)

    def backward(self, unit: int) -> None:
        """A backward ran through the pass of this unit."""
        known = self._units.get(unit)
        if known is not None:
            known.backward = True

    def update(self, optimizer: Optimizer, plan: Plan) -> None:
        """An optimizer is about to update: note the mean of its smallest recorded parameter."""
        self._reads_parameters = True
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        key = len(held), id(optimizer)
        if self._smallest is None or self._smallest[0] != key:
            found = [
                (port.site.name, parameter)
                for port in plan.ports
                if port.site.kind == "param" and port.site.module is not None
                if (parameter := port.site.module._parameters.get(port.site.leaf)) is not None
                if id(parameter) in held and parameter.is_cpu and 0 < parameter.numel() <= _SMALL
            ]
            self._smallest = key, min(found, key=lambda each: each[1].numel(), default=None)
        if self._smallest[1] is not None:
            site, smallest = self._smallest[1]
            self._means[self.updates] = site, float(smallest.detach().double().mean())

    def model_changed(self) -> None:
        """Names stand for other parameters from now on."""
        self._smallest = None
        self._means.clear()
        self._params.clear()

    # -- the recording's side -----------------------------------------------------------------------------

    def assigned(self, unit: int, moment: Moment) -> None:
        """The tracker has found the step and phase of a unit."""
        known = self._units.pop(unit, None)
        if unit in self._placed:
            self._fail(f"values of step {moment.step} were assigned twice")
        self._placed.add(unit)
        if known is None:
            return
        if known.kind == "pass" and not known.named:
            if known.backward and moment.phase in ("eval", "forward"):
                self._fail(
                    f"a pass of step {moment.step} that a backward ran through is in phase {moment.phase!r}"
                )
            if moment.phase == "train" and not known.grad:
                self._fail(f"a pass without gradients is in phase 'train' of step {moment.step}")
        self._open.setdefault(moment.step, []).append((known, moment))

    def dropped(self, unit: int, reason: str) -> None:
        """The tracker has found that a unit belongs to no step."""
        known = self._units.pop(unit, None)
        self._placed.add(unit)
        if known is not None and known.kind != "state" and reason not in ("early", "between"):
            self._fail(f"{known.times} {known.kind}(es) were dropped: {reason}")

    def left(self, moment: Moment, updates: tuple[Update, ...]) -> None:
        """A step is whole, or its training is; these updates made it."""
        step = moment.step
        for each in updates:
            if each.number != self._recorded:
                self._fail(
                    f"update {each.number} is recorded where {self._recorded} was expected (step {step})"
                )
            self._recorded = each.number + 1
        noted = self._open.pop(step, ())
        held = [parameter for each in updates for parameter in each.parameters]
        if len(held) != len(set(held)) and all(known.mark is None for known, _ in noted):
            self._fail(f"step {step} updates a parameter twice")
        for known, at in noted:
            # After an update, evaluations and numbers may still be its; everything else is the next one's.
            late = known.kind == "log" or (known.kind == "pass" and at.phase not in ("train", "forward"))
            if known.mark is not None:
                if known.mark != step:
                    self._fail(f"a {known.kind} inside step {known.mark} is recorded in step {step}")
            elif updates and not updates[0].number <= known.after <= updates[-1].number + late:
                self._fail(
                    f"a {known.kind} of phase {at.phase!r} that came after {known.after} updates is in step {step}, "
                    f"which has updates {updates[0].number} to {updates[-1].number}"
                )
        if len(self._placed) > 2 * _REMEMBERED:
            newest = max(self._placed)
            self._placed = {each for each in self._placed if each > newest - _REMEMBERED}

    def record(self, record: StepRecord) -> None:
        """A record was handed on."""
        self.records += 1
        step, phases = self._newest
        if record.step < step:
            self._fail(f"a record of step {record.step} came after one of step {step}")
        elif record.step > step:
            phases = {}
        before = phases.setdefault(record.phase, [])
        tables = {(id(block.sites), id(block.statistics)) for block in record.scalars}
        if len(tables) < len(record.scalars):
            self._fail(f"step {record.step} has a table of sites twice")
        if before and any(_overlap(block, other) for block in record.scalars for other in before):
            self._fail(f"step {record.step} occurs twice in phase {record.phase!r}")
        before.extend(record.scalars)
        self._newest = record.step, phases
        if self._reads_parameters and record.phase not in ("eval", "forward"):
            self._check_parameters(record)

    def _check_parameters(self, record: StepRecord) -> None:
        """Compare with what the optimizer found, and with the step before: means add up."""
        found, changes = _means(record, ":param."), _means(record, ":update.")
        for number in [each for each in self._means if each < self._recorded]:
            site, mean = self._means.pop(number)
            if number == self._recorded - 1 and site in found and not _close(found[site], mean):
                self._fail(f"{site} of step {record.step} is not what the optimizer found")
        for site, values in found.items():
            step, expected, largest = self._params.get(site, (-1, math.nan, 0.0))
            if step == record.step - 1 and not _close(values, expected, largest):
                self._moved.add(record.step)
        self._params = {
            site: (record.step, values[0] + changes[other][0], changes[other][1])
            for site, values in found.items()
            if (other := site.replace(":param.", ":update.")) in changes
        }

    # -- the end ------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the facts for the run. ``failed`` is empty if everything adds up."""
        if self.updates != self._recorded:
            self._fail(f"{self.updates} updates were seen and {self._recorded} are recorded")
        homeless = [each for each in self._units.values() if each.kind != "state"]
        if homeless:
            self._fail(f"{len(homeless)} of {sum(self._counts)} passes and numbers belong to no step")
        left = sum(map(len, self._open.values()))
        if left:
            self._fail(f"{left} passes and numbers are in steps that were never handed on")
        moved = sorted(self._moved)
        return {
            "updates": self.updates,
            "passes": self._counts[0],
            "numbers": self._counts[1],
            "failed": list(self.violations),
            "changed_outside": moved[:_MOST],
        }


def _overlap(block: ScalarBlock, other: ScalarBlock) -> bool:
    """Return True if two blocks have the same statistics of a site."""
    if block.statistics != other.statistics:
        return False
    mine, its = (
        {site for row, site in enumerate(each.sites) if each.present is None or each.present[row]}
        for each in (block, other)
    )
    return not mine.isdisjoint(its)


def _means(record: StepRecord, kind: str) -> dict[str, tuple[float, float]]:
    """Return the mean and the largest element of each parameter that a record has."""
    found: dict[str, tuple[float, float]] = {}
    for block in record.scalars:
        if "mean" not in block.statistics or "absmax" not in block.statistics:
            continue
        mean, largest = block.statistics.index("mean"), block.statistics.index("absmax")
        values: npt.NDArray[np.float64] = block.values
        for row, site in enumerate(block.sites):
            if kind in site and (block.present is None or block.present[row]):
                found[site] = float(values[row, mean]), float(values[row, largest])
    return found


def _close(value: tuple[float, float], expected: float, more: float = 0.0) -> bool:
    """Compare a mean, with the rounding of elements as large as these."""
    if not (math.isfinite(value[0]) and math.isfinite(expected)):
        return True
    return abs(value[0] - expected) <= 2e-6 * (abs(value[1]) + abs(more)) + 1e-9
