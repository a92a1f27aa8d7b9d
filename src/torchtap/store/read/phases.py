"""Which phase a site is shown in where none is asked for: training first, so that phases are never mixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torchtap.errors import SelectionError
from torchtap.store.read.results import TensorRef

__all__ = ["TRAINING", "first_phase", "in_order", "no_such_phase", "of_one_phase"]

TRAINING = "train"


def in_order(phases: Iterable[str]) -> list[str]:
    """Training first, the others as they were recorded."""
    return sorted(phases, key=lambda phase: phase != TRAINING)


def first_phase(phases: Sequence[str], recorded: Collection[str]) -> str:
    """Of a run's phases the first in which something was recorded; training where nothing was."""
    return next((phase for phase in in_order(phases) if phase in recorded), TRAINING)


def of_one_phase(refs: Sequence[TensorRef], phases: Sequence[str]) -> list[TensorRef]:
    """The tensors of each site in one phase."""
    if len(phases) <= 1:
        return list(refs)
    recorded: dict[str, set[str]] = {}
    for ref in refs:
        recorded.setdefault(ref.site, set()).add(ref.phase)
    shown = {site: first_phase(phases, own) for site, own in recorded.items()}
    return [ref for ref in refs if ref.phase == shown[ref.site]]


def no_such_phase(path: str, phase: str, known: Sequence[str]) -> SelectionError:
    """The error for a phase that a run does not have."""
    has = ", ".join(known) or "no records"
    return SelectionError(f"the run at {path} has no phase {phase!r}; it has {has}", nearest=tuple(known))
