"""`diagnose`: a run in, its findings out, the gravest first.

Reads through the public reader only and never imports torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchtap.diagnosis.checks import (
    dead_or_constant,
    dead_units,
    exploding_or_vanishing,
    saturated,
    without_gradient,
)
from torchtap.diagnosis.finding import Finding, Limits
from torchtap.diagnosis.grid import places, spread_steps
from torchtap.diagnosis.nonfinite import first_nonfinite

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["diagnose"]


def diagnose(run: Run | str | os.PathLike[str], *, limits: Limits | None = None) -> list[Finding]:
    """What looks wrong in ``run`` (a run or the path of one): an empty list if nothing does.

    >>> for finding in diagnose("runs/exp1"):  # doctest: +SKIP
    ...     print(finding)
    """
    if isinstance(run, (str, os.PathLike)):
        from torchtap.store.read.reader import open_run

        run = open_run(run, partial=True)
    limits = limits or Limits()
    all_places = places(run)
    found = first_nonfinite(run, all_places)
    # After the first NaN everything is broken: what was wrong before it is worth knowing.
    steps = spread_steps(run, limits.steps, found[0].step if found else None)
    found += without_gradient(run, all_places, steps, limits)
    found += exploding_or_vanishing(run, all_places, steps, limits)
    found += dead_or_constant(run, all_places, steps, limits)
    found += dead_units(run, all_places, steps, limits)
    found += saturated(run, all_places, steps, limits)
    return sorted(found, key=lambda finding: finding.severity != "error")
