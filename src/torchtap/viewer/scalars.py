"""The values that a training logged, over steps, epochs or time, smoothed where asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.viewer.downsample import keep_points
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["scalars_of", "smoothed"]


def scalars_of(
    shown: OpenRun, site: str, *, phase: str | None = None, smooth: float = 0.0, points: int = 2000
) -> bytes:
    """One logged value: arrays steps, epochs, seconds (since the run's first record), value, and smooth."""
    with shown.lock:
        if site not in shown.position or "value" not in shown.statistics[site]:
            raise Refused(f"this run has no logged value {site!r}", 404)
        steps, values = shown.series(site, "value", phase)
        epochs, seconds = shown.clock_of(steps)
        revision = shown.revision
    columns = [values]
    if smooth > 0:
        columns.append(smoothed(values, smooth))
    kept = keep_points(columns, points)
    arrays: dict[str, np.ndarray] = {
        "steps": steps[kept].astype(np.float64),
        "epochs": epochs[kept],
        "seconds": seconds[kept],
        "value": values[kept],
    }
    if smooth > 0:
        arrays["smooth"] = columns[1][kept]
    return pack({"site": site, "total": len(steps), "revision": revision}, arrays)


def smoothed(values: npt.NDArray[np.float64], weight: float) -> npt.NDArray[np.float64]:
    """An exponential average without the pull of its start; what is not finite is left out and stays a gap."""
    weight = min(max(weight, 0.0), 0.999)
    result = np.full(len(values), np.nan)
    total = share = 0.0
    for index, value in enumerate(values.tolist()):
        if np.isfinite(value):
            total = weight * total + (1 - weight) * value
            share = weight * share + (1 - weight)
            result[index] = total / share
    return result
