"""Hold one open run for the viewer: its lock, and a bounded cache of what was read.

Guarantees:
- one thread at a time reads a run, however many requests are open;
- refreshing a growing run reads only its new part;
- the memory of the cache is bounded.

Not here: the list of runs (`run_index`), what is computed from the numbers (`charts`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import ChartedSite, places
from torchtap.sanitize import browser_text
from torchtap.viewer.arrays import DERIVED, EMPTY_SUMS, block_extremes, derive, without_empty_sums

if TYPE_CHECKING:
    from torchtap import Run
    from torchtap.diagnosis.finding import Findings

__all__ = ["BLOCK", "NumberGrid", "OpenRun", "Refused"]


T = TypeVar("T")
BLOCK = 4
_GRID_BYTES = 768 << 20  # statistics of a run kept in memory, as float32
_STRETCH = 1 << 21  # numbers read at a time
_TENSOR_BYTES = 256 << 20
_LARGEST_TENSOR = 256 << 20  # unpacked


class Refused(Exception):
    """A request that is refused with the HTTP status ``status``."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@final
class NumberGrid:
    """One statistic of all sites that have it: rows in execution order, columns steps, NaN where absent."""

    def __init__(
        self, sites: list[str], steps: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
    ) -> None:
        self.sites = sites
        self.steps = steps
        self.values = values
        self.row = {site: row for row, site in enumerate(sites)}
        self._blocks: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None

    def blocks(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The least and the greatest of every `BLOCK` steps, computed once: a wide view needs no more."""
        if self._blocks is None:
            self._blocks = block_extremes(self.values, BLOCK)
        return self._blocks

    def is_start_of(self, sites: list[str], steps: npt.NDArray[np.int64]) -> bool:
        """Return True if a grid of these sites and steps begins with this one."""
        return self.sites == sites and np.array_equal(self.steps, steps[: len(self.steps)])


@final
class OpenRun:
    """One run, open for looking."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        self.lock = threading.RLock()
        self._diagnosing = threading.Lock()
        self.revision = 0
        self._seen = self._state()
        self._survey()
        self._grids: OrderedDict[str, tuple[int, NumberGrid]] = OrderedDict()
        self._tensors: OrderedDict[tuple[str, int | None, str], np.ndarray] = OrderedDict()
        self._remembered: dict[tuple[str, ...], Any] = {}
        self._findings: tuple[int, Findings] | None = None
        self._phases: dict[str, OpenRun] = {}

    def _state(self) -> tuple[int, int, str, int]:
        steps = self.run.steps()
        return len(steps), int(steps[-1]) if len(steps) else -1, self.run.status, len(self.run.problems)

    def _survey(self) -> None:
        self.places: list[ChartedSite] = places(self.run)
        self.sites = [place.name for place in self.places]
        self.position = {site: index for index, site in enumerate(self.sites)}
        self.statistics = {site: tuple(self.run.statistics(site)) for site in self.sites}
        names = dict.fromkeys((*self.sites, *(name for held in self.statistics.values() for name in held)))
        self._asked = {safe: name for name in names if (safe := browser_text(name)) != name}

    def asked(self, name: str) -> str:
        """The site or statistic that the page means: some names reach it spelled out (`browser_text`)."""
        return self._asked.get(name, name)

    def refresh(self) -> int:
        """Look for what was written since; the revision rises when there is something new."""
        with self.lock:
            self.run.refresh()
            for part in self._phases.values():
                part.refresh()
            state = self._state()
            if state != self._seen:
                self._seen = state
                self._survey()
                self.revision += 1
            return self.revision

    def in_phase(self, phase: str) -> OpenRun:
        """Return the run restricted to one phase, or the whole run without one."""
        if not phase:
            return self
        with self.lock:
            if phase not in self._phases:
                self._phases[phase] = OpenRun(self.run.of_phase(phase), self.name)
            return self._phases[phase]

    def grid(self, statistic: str) -> NumberGrid:
        """``statistic`` of every site that has it (also one of the derived)."""
        with self.lock:
            known = self._grids.get(statistic)
            if known is not None and known[0] == self.revision:
                self._grids.move_to_end(statistic)
                return known[1]
            if statistic in DERIVED:
                fresh = NumberGrid(*derive(statistic, self.grid, self.sites, self._recorded()))
                if statistic == "nonfinite":
                    fresh = self._with_logged(fresh)
            else:
                fresh = self._read(statistic, known[1] if known else None)
            self._grids[statistic] = (self.revision, fresh)
            self._grids.move_to_end(statistic)
            while (
                len(self._grids) > 1 and sum(g.values.nbytes for _, g in self._grids.values()) > _GRID_BYTES
            ):
                self._grids.popitem(last=False)
            return fresh

    def recorded(self, statistic: str) -> npt.NDArray[np.bool_]:
        """Return which cells of `grid` were recorded: a NaN is a recorded number, or a step without a record."""
        grid = self.grid(statistic)
        return self.remember(("recorded", statistic), lambda: self._recorded_cells(grid, statistic))

    def _recorded_cells(self, grid: NumberGrid, statistic: str) -> npt.NDArray[np.bool_]:
        there = ~np.isnan(grid.values)
        for row in np.flatnonzero(~there.all(axis=1)).tolist():
            site = grid.sites[row]
            if statistic in self.statistics[site]:
                steps = np.asarray(self.run.series(site, statistic, partial=True).steps)
                at = np.searchsorted(grid.steps, steps)
                there[row, at[at < len(grid.steps)]] = True
        return there

    def _read(self, statistic: str, known: NumberGrid | None) -> NumberGrid:
        sites = [site for site in self.sites if statistic in self.statistics[site]]
        if not sites:
            raise Refused(f"no site of this run has a statistic {statistic!r}", 404)
        steps = np.asarray(self.run.steps(), dtype=np.int64)
        grown = known if known is not None and known.is_start_of(sites, steps) else None
        fresh_steps = steps if grown is None else steps[len(grown.steps) :]
        if grown is not None and not len(fresh_steps):
            return grown
        numbers = np.empty((len(sites), len(steps)), dtype=np.float32)
        done = len(steps) - len(fresh_steps)
        if grown is not None:
            numbers[:, :done] = grown.values
        self._read_into(numbers[:, done:], statistic, sites, fresh_steps)
        if statistic in EMPTY_SUMS:
            self._unsay_empty_sums(sites, numbers)
        return NumberGrid(sites, steps, numbers)

    def _read_into(
        self,
        numbers: npt.NDArray[np.float32],
        statistic: str,
        sites: list[str],
        steps: npt.NDArray[np.int64],
    ) -> None:
        """A stretch of steps at a time: the reader's float64 would be twice as large as what is kept."""
        stretch = max(1, _STRETCH // max(1, len(sites)))
        for start in range(0, len(steps), stretch):
            part = steps[start : start + stretch]
            with np.errstate(over="ignore"):
                numbers[:, start : start + len(part)] = self.run.matrix(statistic, sites, part).values

    def _recorded(self) -> set[str]:
        return {name for held in self.statistics.values() for name in held}

    def _unsay_empty_sums(self, sites: list[str], numbers: npt.NDArray[np.float32]) -> None:
        """A norm of nothing but NaN is recorded as zero, the sum over no finite value. Zero would lie."""
        if (numbers == 0).any() and any("nans" in self.statistics[site] for site in sites):
            broken = self.grid("nans")
            rows = [broken.row.get(site, -1) for site in sites]
            for row, other in enumerate(rows):
                if other >= 0:
                    empty = (numbers[row] == 0) & (broken.values[other] > 0)
                    numbers[row, empty] = np.nan

    def _with_logged(self, grid: NumberGrid) -> NumberGrid:
        """The grid with a row for each logged value: 1 where it was recorded and is not finite."""
        logged = [site for site in self.sites if "value" in self.statistics[site] and site not in grid.row]
        if not logged:
            return grid
        rows = np.full((len(logged), len(grid.steps)), np.nan, dtype=np.float32)
        for row, site in enumerate(logged):
            steps, values = self.run.series(site, "value")
            rows[row, np.searchsorted(grid.steps, steps)] = ~np.isfinite(values)
        return NumberGrid([*grid.sites, *logged], grid.steps, np.concatenate([grid.values, rows]))

    def series(
        self, site: str, statistic: str, phase: str | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Steps and values of a recorded statistic. Call it with the lock held."""
        if phase is not None and phase not in self.run.phases:
            return np.zeros(0, np.int64), np.zeros(0)
        found = self.run.series(site, statistic, phase)
        steps, values = np.asarray(found.steps, np.int64), np.asarray(found.values, np.float64)
        if statistic in EMPTY_SUMS and "nans" in self.statistics[site]:
            values = without_empty_sums(statistic, values, self.run.series(site, "nans", phase).values)
        return steps, values

    def clock_of(
        self, steps: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The epoch of each step (NaN where none was set) and the seconds since the run's first record."""
        clock = self.remember(("clock",), self.run.clock)
        if not len(clock):
            return np.full(len(steps), np.nan), np.full(len(steps), np.nan)
        at = np.clip(np.searchsorted(clock["step"], steps), 0, len(clock) - 1)
        epochs = np.asarray(clock["epoch"], dtype=np.float64)[at]
        times = np.asarray(clock["time"], dtype=np.float64)
        return np.where(epochs >= 0, epochs, np.nan), times[at] - times.min()

    def remember(self, key: tuple[str, ...], compute: Callable[[], T]) -> T:
        """``compute()``, once for each state of the run. Call it with the lock held."""
        if self._remembered.get(("revision",)) != self.revision:
            self._remembered = {("revision",): self.revision}
        if key not in self._remembered:
            self._remembered[key] = compute()
        found: T = self._remembered[key]
        return found

    def tensor(self, site: str, step: int | None, field: str) -> np.ndarray:
        """A recorded tensor; the last few are kept, for the sliders of the page."""
        key = (site, step, field)
        with self.lock:
            if key in self._tensors:
                self._tensors.move_to_end(key)
                return self._tensors[key]
            for reference in self.run.tensors(site):
                if reference.step == step and browser_text(reference.field) == field:
                    field = reference.field
                    if reference.unpacked > _LARGEST_TENSOR:
                        raise Refused(
                            f"the tensor has {reference.unpacked:,} bytes, too many to show; run.array reads it",
                            413,
                        )
            value = self.run.array(site, step=step, field=field)
            self._tensors[key] = value
            while len(self._tensors) > 1 and sum(t.nbytes for t in self._tensors.values()) > _TENSOR_BYTES:
                self._tensors.popitem(last=False)
            return value

    def findings(self) -> Findings:
        """Diagnose the present state of the run."""
        from torchtap import open as open_run
        from torchtap.diagnosis.diagnose import diagnose

        with self._diagnosing:
            revision = self.revision
            if self._findings is None or self._findings[0] != revision:
                # Uses its own reader: a diagnosis takes a while, and maps and series are requested meanwhile.
                self._findings = (
                    revision,
                    diagnose(open_run(self.run.path, rank=self.run.shown_rank, partial=True)),
                )
            return self._findings[1]
