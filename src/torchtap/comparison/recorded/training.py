"""What two trainings did differently between two steps: the update itself, told from parameters before and after.

Parameters are recorded as the forward of a step used them. When those of a step differ and everything of the step
before agrees, the update in between is to blame: all of it by one factor (a learning rate), by a share of the
parameters (weight decay), or some of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtap.comparison.judge.result import AGREES, First, Row
from torchtap.comparison.measure.patterns import factor
from torchtap.comparison.recorded.recordings import Recording
from torchtap.errors import TorchtapError
from torchtap.names import join_path, read_name

__all__ = ["explain_update"]

_FITS = 0.03  # what a fit may leave unexplained
_ALIKE = 0.02  # how far the factors of two parameters may be apart

Wide = npt.NDArray[np.float64]
Update = tuple[Wide, Wide, Wide]  # the reference's update, the target's, the reference's parameter before


def explain_update(
    reference: Recording, target: Recording, rows: Sequence[Row], step: int, before: int | None
) -> First | None:
    """The verdict when parameters are the first to differ; ``None`` when something else is."""
    parameters = [row for row in rows if row.kind == "param"]
    wrong = [row for row in parameters if row.status == "diverged"]
    if not wrong or before is None:
        return None
    first = wrong[0]
    every = len(wrong) == len(parameters)
    module = "" if len({row.module for row in wrong}) > 1 else first.module
    updates = [
        update
        for row in wrong
        if (update := _update(reference, target, row.site, row.target_site, before, step)) is not None
    ]
    how = _in_words(updates) or (
        "differs" if every or len(wrong) > 1 else "differs, or it was changed by hand"
    )
    who = (
        f"every update (of all {len(parameters)} parameters)"
        if every and len(parameters) > 1
        else f"the update of {len(wrong)} of {len(parameters)} parameters, first {_name(first.site)},"
    )
    agree = "; values and gradients before it agree" if any(row.status in AGREES for row in rows) else ""
    return First(
        site=first.site,
        module=module,
        index=first.index,
        error=first.error,
        floor=first.floor,
        origin="update",
        sure="likely",
        step=before,
        what=f"{who} {how}{agree}",
        others=tuple(dict.fromkeys(row.module for row in wrong if row.module != module))[:8]
        if module
        else (),
    )


def _name(site: str) -> str:
    name = read_name(site)
    return f"`{join_path(name.path, name.leaf)}`"


def _update(
    reference: Recording, target: Recording, site: str, theirs: str, before: int, step: int
) -> Update | None:
    try:
        values = [
            recording.value(name, at)
            for recording, name in ((reference, site), (target, theirs))
            for at in (before, step)
        ]
    except (TorchtapError, KeyError):
        return None
    old, new, their_old, their_new = values
    if old is None or new is None or their_old is None or their_new is None:
        return None
    if len({value.shape for value in (old, new, their_old, their_new)}) > 1:
        return None
    return new.wide() - old.wide(), their_new.wide() - their_old.wide(), old.wide()


def _in_words(updates: list[Update]) -> str:
    """One relation that holds for all updates; empty when there is none."""
    if not updates:
        return ""
    moved = [update for update in updates if update[0].any()]
    if moved and not any(theirs.any() for _, theirs, _ in moved):
        return "is missing in the target"
    scale = _shared([factor(mine, theirs) for mine, theirs, _ in moved])
    if scale is not None:
        return f"is {scale:.3g} × the reference's"
    decayed = [(theirs - mine, old) for mine, theirs, old in updates if old.any()]
    decay = _shared([factor(old, extra) for extra, old in decayed if extra.any()])
    if decay is not None:
        return (
            f"is the reference's {'+' if decay > 0 else '−'} {abs(decay):.2g} × the parameter (weight decay)"
        )
    return ""


def _shared(fits: list[tuple[float, float]]) -> float | None:
    """The factor that all fits have in common, if each is a good one."""
    if not fits or any(not left <= _FITS for _, left in fits):
        return None
    factors = [constant for constant, _ in fits]
    middle = sorted(factors)[len(factors) // 2]
    alike = all(abs(constant - middle) <= _ALIKE * abs(middle) for constant in factors)
    return middle if alike and abs(middle - 1.0) > 1e-4 else None
