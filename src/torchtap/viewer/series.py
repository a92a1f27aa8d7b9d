"""A site over time: its series with every extreme kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.viewer.derived import DERIVED
from torchtap.viewer.downsample import keep_points
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["series_of"]


def series_of(
    shown: OpenRun,
    site: str,
    statistics: list[str],
    first_step: int | None = None,
    last_step: int | None = None,
    points: int = 1600,
) -> bytes:
    """``statistics`` of ``site`` over the steps that have any of them, at most about ``points`` steps."""
    with shown.lock:
        if site not in shown.position:
            raise Refused(f"this run has no site {site!r}", 404)
        steps, columns = _on_common_steps(shown, site, statistics)
        total = len(steps)
        inside = np.ones(total, dtype=bool)
        if first_step is not None:
            inside &= steps >= first_step
        if last_step is not None:
            inside &= steps <= last_step
        steps = steps[inside]
        columns = {key: column[inside] for key, column in columns.items()}
        kept = keep_points(list(columns.values()), max(2, points // max(1, len(columns))))
        facts = {"site": site, "statistics": list(columns), "total": total, "revision": shown.revision}
    arrays: dict[str, np.ndarray] = {"steps": steps[kept].astype(np.float64)}
    for number, column in enumerate(columns.values()):
        arrays[f"s{number}"] = column[kept]
    return pack(facts, arrays)


def _on_common_steps(
    shown: OpenRun, site: str, statistics: list[str]
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
    """The statistics that the site has, all on the steps that any of them has."""
    columns: dict[str, npt.NDArray[np.float64]] = {}
    steps = np.zeros(0, dtype=np.int64)
    for name in dict.fromkeys(statistics):
        if name in shown.statistics[site]:
            its_steps, values = shown.series(site, name)
        elif name in DERIVED and site in shown.grid(name).row:
            grid = shown.grid(name)
            its_steps, values = grid.steps, grid.values[grid.row[site]].astype(np.float64)
        else:
            continue
        if not columns:
            steps = its_steps
        elif not np.array_equal(steps, its_steps):
            merged = np.union1d(steps, its_steps)
            columns = {key: _onto(merged, steps, column) for key, column in columns.items()}
            values, steps = _onto(merged, its_steps, values), merged
        columns[name] = values
    return steps, columns


def _onto(
    wanted: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    spread = np.full(len(wanted), np.nan)
    spread[np.searchsorted(wanted, steps)] = values
    return spread
