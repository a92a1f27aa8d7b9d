"""`plot`: a run as a matplotlib figure: a few sites as lines, many as a map of depth against time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtap.errors import needing
from torchtap.sanitize import shown
from torchtap.viewer.chosen import Picture, picture_of
from torchtap.viewer.colours import NOT_FINITE, sequential

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchtap.store.read.reader import Run

__all__ = ["plot"]

_MOST_LINES = 8
_MOST_NAMES = 40
_LINEAR = frozenset({"mean", "min", "max", "zeros", "count", "value"})


def plot(
    run: Run | str | os.PathLike[str],
    sites: str | Sequence[str] | None = None,
    statistic: str | None = None,
    *,
    kind: str | None = None,
    log: bool | None = None,
    size: tuple[float, float] = (10.0, 6.0),
) -> Figure:
    """One statistic of ``sites`` (names or patterns such as ``blocks.*:output``) over the steps of a run.

    Up to eight sites are lines; more are a map with the sites in execution order from top to bottom. Without
    ``sites``, all of ``kind``; ``log`` is chosen by the statistic unless given.
    """
    with needing("matplotlib", "plot", who="plot"):
        from matplotlib.figure import Figure
    if isinstance(run, (str, os.PathLike)):
        from torchtap.store.read.reader import open_run

        run = open_run(run)
    picture = picture_of(run, statistic, [sites] if isinstance(sites, str) else sites, kind)
    if log is None:
        log = picture.statistic not in _LINEAR
    log = log and bool((picture.values > 0).any())
    figure: Figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    if len(picture.sites) <= _MOST_LINES:
        _lines(axes, picture, log)
    else:
        _map(figure, axes, picture, log)
    axes.set_xlabel("step")
    return figure


def _label(name: str) -> str:
    """A name as matplotlib draws it: dollars begin formulas, and an underscore in front hides a line."""
    text = shown(name, 120).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _lines(axes: Any, picture: Picture, log: bool) -> None:
    for site, values in zip(picture.sites, picture.values, strict=True):
        there = np.isfinite(values)
        axes.plot(picture.steps[there], values[there], label=_label(site), linewidth=1.4)
    if log:
        axes.set_yscale("log")
    axes.set_ylabel(_label(picture.statistic))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")


def _map(figure: Any, axes: Any, picture: Picture, log: bool) -> None:
    from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgb

    colours = ListedColormap(np.array(sequential()) / 255.0).with_extremes(bad=(*to_rgb(NOT_FINITE), 0.25))
    values = np.ma.masked_invalid(picture.values)
    finite = values.compressed()
    if log:
        finite = finite[finite > 0]
    low, high = np.quantile(finite, [0.005, 0.995]) if len(finite) else (0.1, 1.0)
    scale = LogNorm(low, max(high, low * 1.01)) if log else Normalize(low, high if high > low else low + 1)
    if log:
        values = np.ma.maximum(values, low / 10)  # an exact zero is less than anything on the scale
    ends = (picture.steps[0] - 0.5, picture.steps[-1] + 0.5, len(picture.sites) - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=scale, extent=ends)
    shown_rows = np.unique(
        np.linspace(0, len(picture.sites) - 1, min(_MOST_NAMES, len(picture.sites))).astype(int)
    )
    axes.set_yticks(shown_rows, [_label(picture.sites[row]) for row in shown_rows], fontsize="x-small")
    figure.colorbar(image, ax=axes, label=_label(picture.statistic), extend="both")
