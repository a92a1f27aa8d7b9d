"""What two trainings did differently, causes before effects: gradients, the optimizer's state, its rate, updates,
parameters.

Of many parameters that differ alike one thing is said: every update is 2 x the reference's (a learning rate), every
gradient 0.1 x (clipping, a scaled loss), every update the reference's less a share of the parameters (weight decay).
Parameters are recorded as the forward of a step used them: when those of a step are the first to differ, the update
before it is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtap.comparison.judge.result import First, Row
from torchtap.comparison.measure.patterns import factor
from torchtap.comparison.recorded.recordings import Recording
from torchtap.errors import TorchtapError
from torchtap.names import join_path, read_name

__all__ = ["explain_training"]

_FITS = 0.03  # what a fit may leave unexplained
_ALIKE = 0.02  # how far the factors of two parameters may be apart
_WORDS = {"param": "update", "update": "update", "param_grad": "gradient"}

Wide = npt.NDArray[np.float64]
Change = tuple[Wide, Wide, Wide | None]  # the reference's, the target's, and the reference's parameter before


def explain_training(
    reference: Recording, target: Recording, rows: Sequence[Row], kind: str, step: int, before: int | None
) -> First | None:
    """The verdict when values of this kind are the first to differ; ``None`` when there is no more to say of them than
    of any other value. ``before`` is the step before, where there is one."""
    wrong = [row for row in rows if row.kind == kind and row.status == "diverged"]
    if not wrong or kind not in (*_WORDS, "lr") or (kind == "param" and before is None):
        return None
    if kind == "lr":
        how = f"the learning rate is another: {wrong[0].note}"
        return _first(wrong, step, how)
    changes = _changes(reference, target, wrong, kind, step, before)
    how = _in_words(changes)
    total = sum(row.kind == kind for row in rows)
    if kind == "param_grad" and (not how or len(wrong) < max(2, total)):
        return None  # one gradient that is wrong is told like any other value
    if not how:
        how = (
            "differs, or it was changed by hand" if kind == "param" and len(wrong) == 1 < total else "differs"
        )
    what = _WORDS[kind]
    who = (
        f"every {what} (of all {total} parameters)"
        if len(wrong) == total > 1
        else f"the {what} of {len(wrong)} of {total} parameters, first {_name(wrong[0].site)},"
    )
    return _first(wrong, before if kind == "param" and before is not None else step, f"{who} {how}")


def _first(wrong: Sequence[Row], step: int, what: str) -> First:
    first = wrong[0]
    module = "" if len({row.module for row in wrong}) > 1 else first.module
    return First(
        site=first.site,
        module=module,
        index=first.index,
        error=first.error,
        floor=first.floor,
        origin="update",
        sure="likely",
        step=step,
        what=what,
    )


def _name(site: str) -> str:
    name = read_name(site)
    return f"`{join_path(name.path, name.leaf)}`"


def _changes(
    reference: Recording, target: Recording, rows: Sequence[Row], kind: str, step: int, before: int | None
) -> list[Change]:
    """What each of these values was, or became since the step before; those that were kept whole."""
    found = []
    for row in rows:
        new, their_new = _wide(reference, row.site, step), _wide(target, row.target_site, step)
        old = their_old = None
        if kind == "param" and before is not None:
            old, their_old = _wide(reference, row.site, before), _wide(target, row.target_site, before)
            if old is None or their_old is None or new is None or their_new is None:
                continue
            if len({value.shape for value in (old, new, their_old, their_new)}) > 1:
                continue
            new, their_new = new - old, their_new - their_old
        elif kind == "update":
            old = _wide(reference, str(read_name(row.site)._replace(kind="param")), step)
        if new is not None and their_new is not None and new.shape == their_new.shape:
            found.append((new, their_new, old if old is not None and old.shape == new.shape else None))
    return found


def _wide(recording: Recording, site: str, step: int) -> Wide | None:
    try:
        value = recording.value(site, step)
    except (TorchtapError, KeyError):
        return None
    return None if value is None else value.wide()


def _in_words(updates: list[Change]) -> str:
    """One relation that holds for all updates; empty when there is none."""
    if not updates:
        return ""
    moved = [update for update in updates if update[0].any()]
    if moved and not any(theirs.any() for _, theirs, _ in moved):
        return "is missing in the target"
    scale = _shared([factor(mine, theirs) for mine, theirs, _ in moved])
    if scale is not None:
        return f"is {scale:.3g} × the reference's"
    decayed = [(theirs - mine, old) for mine, theirs, old in updates if old is not None and old.any()]
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
