"""What looks wrong in a run's statistics: dead, constant and saturated values, sizes that explode or vanish,
parameters without a gradient.

Each check is a pure function from a run and the steps to look at to findings, and reads only the statistics
that it needs. Sites that show the same thing are one finding, its worst site first.

Not here: the origin of a NaN (`nonfinite`), and the order of all findings (`run`).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.finding import Finding, Kind, Limits, Severity
from torchtap.diagnosis.grid import Grid, Place, grid

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["dead_or_constant", "dead_units", "exploding_or_vanishing", "saturated", "without_gradient"]

Steps = npt.NDArray[np.int64]

_GRADIENTS = ("grad_output", "grad_input", "param_grad")


def _late(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The median of each row's last quarter: what the site is like now."""
    return _medians(values[:, -max(1, values.shape[1] // 4) :])


def _medians(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row without any value is NaN, as it should be
        return np.asarray(np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=1), np.float64)


def _first_step(found: Grid, over: npt.NDArray[np.bool_]) -> int | None:
    hits = np.flatnonzero(over)
    return int(found.steps[hits[0]]) if len(hits) else None


def _gather(
    kind: Kind,
    severity: Severity,
    hits: list[tuple[float, str, int | None]],
    sentence: str,
    advice: str,
) -> list[Finding]:
    """One finding for all ``hits`` (badness, site, first step); ``sentence`` tells of the worst."""
    if not hits:
        return []
    hits = sorted(hits, key=lambda hit: -hit[0])
    value, site, step = hits[0]
    others = len(hits) - 1
    also = f" (and {others} more)" if others else ""
    message = sentence.format(site=site, also=also, value=value, step=step)
    return [Finding(kind, severity, site, step, value, message, advice, tuple(hit[1] for hit in hits))]


def dead_or_constant(run: Run, all_places: list[Place], steps: Steps, limits: Limits) -> list[Finding]:
    """Outputs that are nearly all zero, or one and the same number."""
    outputs = [place.name for place in all_places if place.kind in ("output", "value")]
    zeros, spreads = grid(run, "zeros", outputs, steps), grid(run, "std", outputs, steps)
    dead = []
    for row, share in enumerate(_late(zeros.values) if len(zeros.sites) else ()):
        if share >= limits.dead_share:
            over = zeros.values[row] >= limits.dead_share
            dead.append((float(share), zeros.sites[row], _first_step(zeros, over)))
    dead_sites = {site for _, site, _ in dead}
    constant = []
    for row, late in enumerate(_late(spreads.values) if len(spreads.sites) else ()):
        if late == 0 and spreads.sites[row] not in dead_sites:
            constant.append((0.0, spreads.sites[row], _first_step(spreads, spreads.values[row] == 0)))
    return _gather(
        "dead",
        "warning",
        dead,
        "{value:.0%} of the values of {site}{also} are exactly zero",
        "Units that never fire learn nothing: look at the learning rate, the initial bias and what feeds them.",
    ) + _gather(
        "constant",
        "warning",
        constant,
        "every value of {site}{also} is the same number",
        "An output that does not depend on its input carries nothing on: look at its weights and its input.",
    )


def dead_units(run: Run, all_places: list[Place], steps: Steps, limits: Limits) -> list[Finding]:
    """Layers of which many units never fire, where a tap kept `Units`."""
    outputs = [place.name for place in all_places if place.kind in ("output", "value")]
    found = grid(run, "dead_share", outputs, steps)
    hits: list[tuple[float, str, int | None]] = []
    for row, late in enumerate(_late(found.values) if len(found.sites) else ()):
        if late >= limits.dead_units:
            over = found.values[row] >= limits.dead_units
            hits.append((float(late), found.sites[row], _first_step(found, over)))
    return _gather(
        "dead",
        "warning",
        hits,
        "{value:.0%} of the units of {site}{also} never fire",
        "Dead units cost time and learn nothing: look at the learning rate and the biases, or make the layer smaller.",
    )


def saturated(run: Run, all_places: list[Place], steps: Steps, limits: Limits) -> list[Finding]:
    """Tanh and sigmoid outputs that sit at their ends; float16 values next to the largest there is."""
    tanh = [p.name for p in all_places if p.kind == "output" and p.module_class.rpartition(".")[2] == "Tanh"]
    sigmoid = [
        p.name for p in all_places if p.kind == "output" and p.module_class.rpartition(".")[2] == "Sigmoid"
    ]
    hits: list[tuple[float, str, int | None]] = []
    found = grid(run, "rms", tanh, steps)
    if found.sites:
        slack = 1 - found.values**2
        for row, late in enumerate(_late(slack)):
            if late <= limits.saturated_tanh:
                first = _first_step(found, slack[row] <= limits.saturated_tanh)
                hits.append((float(1 - late), found.sites[row], first))
    means, sizes = grid(run, "mean", sigmoid, steps), grid(run, "rms", sigmoid, steps)
    if means.sites and means.sites == sizes.sites:
        slack = means.values - sizes.values**2  # the mean of x(1 - x)
        for row, late in enumerate(_late(slack)):
            if late <= limits.saturated_sigmoid:
                first = _first_step(means, slack[row] <= limits.saturated_sigmoid)
                hits.append((float(1 - 4 * late), means.sites[row], first))
    half = [p.name for p in all_places if p.dtype.endswith("float16") and not p.dtype.endswith("bfloat16")]
    tops = grid(run, "absmax", half, steps)
    near = []
    for row in range(len(tops.sites)):
        over = tops.values[row] >= limits.half_precision
        if over.any():
            near.append((float(np.nanmax(tops.values[row])), tops.sites[row], _first_step(tops, over)))
    return _gather(
        "saturated",
        "warning",
        hits,
        "{site}{also} is saturated: nearly every value sits at the end of its range",
        "A saturated activation passes no gradient: look at the size of what goes into it.",
    ) + _gather(
        "saturated",
        "warning",
        near,
        "{site}{also} reaches {value:,.0f}, next to the largest float16",
        "The next step up is inf: scale it down, or compute it in bfloat16 or float32.",
    )


def exploding_or_vanishing(run: Run, all_places: list[Place], steps: Steps, limits: Limits) -> list[Finding]:
    """Sizes (rms) far from what they were, or gradients far below those of the same kind elsewhere."""
    growing: list[tuple[float, str, int | None]] = []
    fading: list[tuple[float, str, int | None]] = []
    for kind in ("output", *_GRADIENTS):
        # A bias of keys before a softmax has a gradient of rounding errors alone, in every healthy model.
        names = [p.name for p in all_places if p.kind == kind and not p.leaf.endswith("bias")]
        found = grid(run, "rms", names, steps)
        if not found.sites or found.values.shape[1] == 0:
            continue
        first = max(1, found.values.shape[1] // 4)
        early = _medians(found.values[:, :first])
        late = _late(found.values)
        usual = float(np.nanmedian(late)) if np.isfinite(late).any() else float("nan")
        for row, site in enumerate(found.sites):
            values = found.values[row]
            if early[row] > 0:
                over = np.isfinite(values) & (values > limits.exploding * early[row])
                over[:first] = False  # what was large at the very start has shrunk, not grown
                if over.any():
                    ratio = float(values[over].max() / early[row])
                    growing.append((ratio, site, _first_step(found, over)))
            if kind in _GRADIENTS and late[row] > 0:
                floor = limits.vanishing * max(usual, early[row] if np.isfinite(early[row]) else 0.0)
                if late[row] < floor:
                    share = float(late[row] / (floor / limits.vanishing))
                    fading.append((-share, site, _first_step(found, values < floor)))
    faded = _gather(
        "vanishing",
        "warning",
        fading,
        "gradients vanish at {site}{also}",
        "Layers nearer the input hardly learn: look at the map of gradients for the layer where they shrink.",
    )
    return _gather(
        "exploding",
        "warning",
        growing,
        "{site}{also} grew to {value:.3g} times its early size, from step {step} on",
        "Look at the loss and the learning rate at that step; clipping gradients bounds the damage.",
    ) + [
        Finding(
            f.kind,
            f.severity,
            f.site,
            f.step,
            None if f.value is None else -f.value,
            f"{f.message}: {-(f.value or 0.0):.1e} of the usual size",
            f.advice,
            f.sites,
        )
        for f in faded
    ]


def without_gradient(run: Run, all_places: list[Place], steps: Steps, limits: Limits) -> list[Finding]:
    """Parameters whose gradient was zero whenever it was recorded."""
    names = [place.name for place in all_places if place.kind == "param_grad"]
    found = grid(run, "absmax", names, steps)
    if not found.sites:
        found = grid(run, "l2", names, steps)
    still: list[tuple[float, str, int | None]] = []
    for row, site in enumerate(found.sites):
        seen = found.values[row][~np.isnan(found.values[row])]
        if len(seen) and not seen.any():
            still.append((0.0, site, int(found.steps[0])))
    return _gather(
        "no-gradient",
        "warning",
        still,
        "{site}{also}: zero at every step, so these parameters do not learn",
        "Look for a detach, a frozen branch or an unused module between them and the loss.",
    )
