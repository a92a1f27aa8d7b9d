"""The clock of a part: which record belongs to which step, and which count when a run was attempted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.sanitize import shortened
from torchtap.store.format.scalars import CLOCK
from torchtap.store.format.segment import Segment
from torchtap.store.read.doubt import Ranges, doubt_about, in_doubt

__all__ = ["ClockRows", "Timeline", "join_clocks", "read_clock"]

_LONGEST_PHASE = 64

# Columns that came with a later version of the format, and what stands for them in an older run.
_LATER = {"passes": 1, "skipped": 0}


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClockRows:
    """Some records' clock, as columns."""

    step: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    phase: npt.NDArray[np.str_]
    time: npt.NDArray[np.float64]
    passes: npt.NDArray[np.int64]
    skipped: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)


def read_clock(segment: Segment) -> ClockRows:
    """The clock columns of a scalar segment."""
    rows = segment.entry("clock.step", "I64").shape
    if len(rows) != 1:
        raise RunCorruptError("its clock is not a column")
    columns: dict[str, np.ndarray] = {
        name: segment.array(segment.entry(f"clock.{name}", code, rows), kind)
        for name, (code, kind) in CLOCK.items()
        if name not in _LATER or f"clock.{name}" in segment.header.entries
    }
    for name, unknown in _LATER.items():
        columns.setdefault(name, np.full(rows, unknown))
    names = _phase_names(segment)
    if rows[0] and int(columns["phase"].max()) >= len(names):
        raise RunCorruptError("its clock has a phase without a name")
    for name in ("epoch", "batch"):
        unset = columns[name] < 0
        columns[name] = np.where(unset, -1, columns[name])
    # an array of texts has room for the longest in every row
    columns["phase"] = np.asarray(names or [""], dtype=np.str_)[columns["phase"]]
    columns["skipped"] = columns["skipped"] != 0
    return ClockRows(**columns)


def _phase_names(segment: Segment) -> list[str]:
    phases = segment.note.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, str) for phase in phases):
        raise RunCorruptError("its phases are not names")
    return [shortened(phase, _LONGEST_PHASE) for phase in phases]


def join_clocks(clocks: list[ClockRows]) -> ClockRows:
    """Several clocks, one after the other."""
    if not clocks:
        whole = np.zeros(0, np.int64)
        names = np.zeros(0, np.str_)
        return ClockRows(whole, whole, whole, names, np.zeros(0), whole, np.zeros(0, bool))
    return ClockRows(
        *(np.concatenate([getattr(clock, name) for clock in clocks]) for name in CLOCK),
    )


@final
class Timeline:
    """The records of all attempts of one rank as one line of steps.

    Within an attempt every record counts. A step that a later attempt recorded again hides what earlier
    attempts recorded of that step.
    """

    def __init__(
        self,
        attempts: list[ClockRows],
        phase: str | None = None,
        lost: Sequence[Ranges] | None = None,
        *,
        partial: bool = False,
    ) -> None:
        self.partial = partial  # whether values in doubt are NaN, and not an error
        self.clock = join_clocks(attempts)
        self.starts = np.cumsum([0, *(len(clock) for clock in attempts)])
        owner = np.repeat(np.arange(len(attempts)), [len(clock) for clock in attempts])
        # all steps, ascending, each once
        self.steps, place = np.unique(self.clock.step, return_inverse=True)
        last = np.zeros(len(self.steps), np.int64)
        last[place] = owner  # attempts come in order, so that the last one stays
        self.visible = owner == last[place]
        self.doubtful = self.visible & in_doubt(
            [clock.step for clock in attempts], lost or [()] * len(attempts)
        )
        if phase is not None:  # one phase alone is looked at
            self.visible &= self.clock.phase == phase
            self.steps = np.unique(self.clock.step[self.visible])
        present = self.clock.phase[self.visible]
        _, first = np.unique(present, return_index=True)
        self.phases: list[str] = [
            str(present[at]) for at in sorted(first)
        ]  # in the order of their first record

    def settled(
        self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """The values at these rows of the clock (the last axis); those in doubt are an error, or NaN if partial."""
        doubt = self.doubtful[rows]
        if not doubt.any():
            return values
        if not self.partial:
            raise doubt_about(self.clock.step[rows[doubt]])
        return np.where(doubt, np.nan, values)

    def check(self, step: int) -> None:
        """Raise when what there is of a step is in doubt."""
        if self.doubtful.any() and self.doubtful[self.clock.step == step].any():
            raise doubt_about(np.array([step]))

    def shown(self, attempt: int, step: int, phase: str) -> bool:
        """Whether what the attempt with this position recorded of a step in a phase is what counts."""
        rows = slice(self.starts[attempt], self.starts[attempt + 1])
        recorded = (self.clock.step[rows] == step) & (self.clock.phase[rows] == phase)
        return bool(np.any(recorded & self.visible[rows]))

    def shown_steps(self, attempt: int) -> set[tuple[int, str]]:
        """The steps that this attempt contributes, each with its phase."""
        rows = slice(self.starts[attempt], self.starts[attempt + 1])
        counts = self.visible[rows]
        return set(
            zip(self.clock.step[rows][counts].tolist(), self.clock.phase[rows][counts].tolist(), strict=True)
        )
