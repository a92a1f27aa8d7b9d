"""Every number of all ranks as a table: the folded series of each site and statistic, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchtap.store.read.results import Table
from torchtap.store.read.view import View

__all__ = ["table_of_series"]


def table_of_series(view: View, sites: list[str], statistics: list[str], *, partial: bool) -> Table:
    """The numbers of these sites and statistics, by step."""
    clock = view.clock()
    phases = view.phases or ["train"]
    pieces: list[tuple[np.ndarray, ...]] = []
    for phase_code, phase in enumerate(phases):
        here = np.asarray(clock)[clock.phase == phase]
        for kind, statistic in enumerate(statistics):
            known = [code for code, site in enumerate(sites) if statistic in view.statistics(site)]
            if not known:
                continue
            found = view.matrix(statistic, [sites[c] for c in known], None, always(phase), partial=partial)
            at = np.searchsorted(here["step"], found.steps)
            for code, values in zip(known, found.values, strict=True):
                there = ~np.isnan(values)
                pieces.append(_columns(here[at[there]], (phase_code, code, kind), values[there]))
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)] if pieces else _nothing()
    order = np.argsort(columns[0], kind="stable")
    step, epoch, batch, phase_codes, site_codes, kinds, value = (column[order] for column in columns)
    return Table(step, epoch, batch, phase_codes, site_codes, kinds, value, phases, sites, statistics)


def _columns(
    rows: np.ndarray, numbers: tuple[int, ...], values: npt.NDArray[np.float64]
) -> tuple[np.ndarray, ...]:
    """Rows of the clock and their values, which all have the same phase, site and statistic."""
    codes = (np.full(len(rows), number, np.int32) for number in numbers)
    return (rows["step"], rows["epoch"], rows["batch"], *codes, values)


def always(phase: str) -> Callable[[str], str]:
    """Every site in one phase."""
    return lambda _: phase


def _nothing() -> list[np.ndarray]:
    whole, code = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return [whole, whole, whole, code, code, code, np.zeros(0)]
