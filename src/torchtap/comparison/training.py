"""What two trainings did differently, causes before effects: gradients, the optimizer's state, its rate, updates,
parameters.

Of many parameters that differ alike one thing is said: every update is 2 x the reference's (a learning rate), every
gradient 0.1 x (clipping, a scaled loss), every update the reference's less a share of the parameters (weight decay).
Parameters are recorded as the forward of a step used them: when those of a step are the first to differ, the update
before it is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.explain import factor
from torchtap.comparison.recordings import Recording
from torchtap.comparison.result import FirstDifference, Row
from torchtap.errors import TorchtapError
from torchtap.plan.names import join_path, read_name

__all__ = ["explain_training"]

_FITS = 0.03  # what a fit may leave unexplained
_ALIKE = 0.02  # how far the factors of two parameters may be apart

Wide = npt.NDArray[np.float64]
Change = tuple[Wide, Wide, Wide | None]  # the reference's, the target's, and the reference's parameter before


def explain_training(
    reference: Recording, target: Recording, rows: Sequence[Row], kind: str, step: int, before: int | None
) -> FirstDifference | None:
    """The verdict when values of this kind are the first to differ; ``None`` when there is no more to say of them than
    of any other value. ``before`` is the step before, where there is one."""
    of_kind = [row for row in rows if row.kind == kind]
    wrong = [row for row in of_kind if row.status == "diverged"]
    found = _Wrong(reference, target, wrong, len(of_kind), step, before)
    explain = {
        "param_grad": found.gradients,
        "lr": found.rate,
        "update": found.updates,
        "param": found.parameters,
    }.get(kind)
    return explain() if explain is not None and wrong else None


@final
@dataclass(frozen=True, slots=True)
class _Wrong:
    """The values of one kind that differ, and what is to be said of them."""

    reference: Recording
    target: Recording
    rows: Sequence[Row]
    total: int
    step: int
    before: int | None

    def gradients(self) -> FirstDifference | None:
        """One gradient that is wrong is told like any other value; so are many that have nothing in common."""
        if not len(self.rows) == self.total > 1:
            return None
        how = _in_words(self._values())
        return self._first(self.step, self._told("gradient", how)) if how else None

    def rate(self) -> FirstDifference:
        return self._first(self.step, f"the learning rate is another: {self.rows[0].note}")

    def updates(self) -> FirstDifference:
        how = _in_words(self._values(with_parameters=True)) or "differs"
        return self._first(self.step, self._told("update", how))

    def parameters(self) -> FirstDifference | None:
        if self.before is None:
            return None
        by_hand = ", or it was changed by hand" if len(self.rows) == 1 < self.total else ""
        how = _in_words(self._moves(self.before)) or f"differs{by_hand}"
        return self._first(self.before, self._told("update", how))

    def _told(self, what: str, how: str) -> str:
        if len(self.rows) == self.total > 1:
            return f"every {what} (of all {self.total} parameters) {how}"
        first = _name(self.rows[0].site)
        return f"the {what} of {len(self.rows)} of {self.total} parameters, first {first}, {how}"

    def _first(self, step: int, what: str) -> FirstDifference:
        first = self.rows[0]
        return FirstDifference(
            site=first.site,
            module="" if len({row.module for row in self.rows}) > 1 else first.module,
            index=first.index,
            error=first.error,
            floor=first.floor,
            origin="update",
            sure="likely",
            step=step,
            what=what,
        )

    def _moves(self, before: int) -> list[Change]:
        """What each of these parameters became since the step before; those that were kept whole."""
        found: list[Change] = []
        for row in self.rows:
            at = ((self.reference, row.site), (self.target, row.target_site))
            values = [_wide(side, site, when) for side, site in at for when in (before, self.step)]
            whole = [value for value in values if value is not None]
            if len(whole) == len(values) and len({value.shape for value in whole}) == 1:
                old, new, their_old, their_new = whole
                found.append((new - old, their_new - their_old, old))
        return found

    def _values(self, *, with_parameters: bool = False) -> list[Change]:
        """What each of these values was; those that were kept whole."""
        found = []
        for row in self.rows:
            mine = _wide(self.reference, row.site, self.step)
            theirs = _wide(self.target, row.target_site, self.step)
            if mine is None or theirs is None or mine.shape != theirs.shape:
                continue
            old = None
            if with_parameters:
                old = _wide(self.reference, str(read_name(row.site)._replace(kind="param")), self.step)
            found.append((mine, theirs, old if old is not None and old.shape == mine.shape else None))
        return found


def _name(site: str) -> str:
    name = read_name(site)
    return f"`{join_path(name.path, name.leaf)}`"


def _wide(recording: Recording, site: str, step: int) -> Wide | None:
    try:
        value = recording.value(site, step)
    except (TorchtapError, KeyError):
        return None
    return None if value is None else value.wide()


def _in_words(updates: list[Change]) -> str:
    """One relation that holds for all updates; empty when there is none."""
    moved = [update for update in updates if update[0].any()]
    if moved and not any(theirs.any() for _, theirs, _ in moved):
        return "is missing in the target"
    scale = _shared([factor(mine, theirs) for mine, theirs, _ in moved])
    if scale is not None:
        return f"is {scale:.3g} × the reference's"
    decay = _decay(updates)
    if decay is None:
        return ""
    return f"is the reference's {'+' if decay > 0 else '−'} {abs(decay):.2g} × the parameter (weight decay)"


def _decay(updates: list[Change]) -> float | None:
    """The share of the parameters that all of the target's updates have on top."""
    decayed = [(theirs - mine, old) for mine, theirs, old in updates if old is not None and old.any()]
    return _shared([factor(old, extra) for extra, old in decayed if extra.any()])


def _shared(fits: list[tuple[float, float]]) -> float | None:
    """The factor that all fits have in common, if each is a good one."""
    if not fits or any(not left <= _FITS for _, left in fits):
        return None
    factors = [constant for constant, _ in fits]
    middle = sorted(factors)[len(factors) // 2]
    alike = all(abs(constant - middle) <= _ALIKE * abs(middle) for constant in factors)
    return middle if alike and abs(middle - 1.0) > 1e-4 else None
