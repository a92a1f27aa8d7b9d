"""Compare two recordings that were made before: `torchtap compare`, and `torchtap.compare` of anything that is not run.

Imports no torch: where the recordings are runs or folders of plain tensors, none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchtap.comparison.align.rules import PairingRule
from torchtap.comparison.given import recording_of
from torchtap.comparison.judge.result import Comparison
from torchtap.comparison.recorded.ahead import Processes, Spread
from torchtap.comparison.recorded.on_ray import RayWorkers
from torchtap.comparison.recorded.phases import compare_all_phases
from torchtap.comparison.recorded.recordings import Recording

__all__ = ["compare_stored", "known_harmless", "listed"]


def compare_stored(
    reference: object,
    target: object,
    *,
    rules: Sequence[str | PairingRule] = (),
    repeat: object = None,
    golden: object = None,
    steps: Sequence[int] | None = None,
    workers: int = 1,
    ray: bool = False,
) -> Comparison:
    """Compare two things that are not to be run; the arguments are those of `torchtap.compare`.

    So many ``workers`` are processes that measure; they are spawned, so a script needs its ``__main__`` guard. With
    ``ray`` they are workers of a Ray cluster.
    """
    left, right = recording_of(reference), recording_of(target)
    harmless = known_harmless(repeat, golden, lambda thing, _: recording_of(thing))
    return compare_all_phases(
        left, right, rules=rules, harmless=harmless, only=steps, spread=_spread(workers, ray)
    )


def _spread(workers: int, ray: bool) -> Spread | None:
    if ray:
        return partial(RayWorkers, workers)
    return partial(Processes, workers) if workers > 1 else None


def listed(things: Any) -> list[Any]:
    """One thing or several, as a list; none for ``None``."""
    if things is None:
        return []
    return list(things) if isinstance(things, (list, tuple)) else [things]


def known_harmless(
    repeat: object, golden: object, take: Callable[[object, str], Recording]
) -> list[tuple[str, Recording]]:
    """The recordings that the user knows to be right."""
    found = [("repeat", take(each, "repeat")) for each in listed(repeat)]
    if golden is not None:
        found.append(("golden", take(golden, "golden")))
    return found
