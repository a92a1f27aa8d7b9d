"""Names in a run: finding what a user means, the errors for what is not there, phases, and texts for a prompt."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchtap.errors import SelectionError
from torchtap.plan.names import path_of, site_name
from torchtap.sanitize import shown
from torchtap.store.files.folder import folder_of
from torchtap.store.files.layout import attempt_folder, parse_attempt, parse_segment, rank_folder
from torchtap.store.read.results import TensorRef

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = [
    "TRAINING",
    "compact",
    "described_sites",
    "first_phase",
    "in_order",
    "no_such_phase",
    "no_such_site",
    "no_such_statistic",
    "no_such_tensor",
    "of_one_phase",
    "only_statistic",
    "recorded_steps",
    "run_text",
    "spelled_out",
]

TRAINING = "train"


def no_such_tensor(site: str, step: int | None, field: str, stored: Sequence[TensorRef]) -> SelectionError:
    """Return the error for a tensor that a site does not have. ``stored`` are those that it has."""
    fields = sorted({ref.field for ref in stored})
    steps = sorted({ref.step for ref in stored if ref.field == field})
    if not steps:
        keep = "Histogram" if field in ("counts", "edges") else "Full"
        has = f"the fields {', '.join(fields)}" if fields else f"numbers only: record it with keep={keep}()"
        return SelectionError(f"{site!r} has no stored tensor with the field {field!r}; it has {has}")
    near = [str(other) for other in sorted(steps, key=lambda other: abs(other - (step or 0)))[:3]]
    return SelectionError(
        f"{site!r} has no {field!r} at step {step}; the nearest steps are {', '.join(near)}",
        nearest=tuple(near),
    )


def spelled_out(site: str, known: Collection[str]) -> str:
    """Return the full name of a site that is written as a module's path or as the name of a logged number."""
    if site not in known and ":" not in site:
        for name in (site_name(site, "output"), site_name("", "value", site)):
            if name in known:
                return name
    return site


def only_statistic(site: str, known: Sequence[str]) -> str:
    """Return the statistic to use if none is named: the only one, or the value of a logged number."""
    if len(known) == 1 or "value" in known:
        return "value" if "value" in known else known[0]
    raise SelectionError(f"{site!r} has several statistics, name one: {', '.join(known) or 'tensors only'}")


def no_such_site(site: str, known: Collection[str]) -> SelectionError:
    """Return the error for a site that a run does not have."""
    of_module = tuple(name for name in known if path_of(name) == site)[:3]
    near = of_module or tuple(difflib.get_close_matches(site, known, n=3, cutoff=0.3))
    hint = f"the nearest are {', '.join(map(repr, near))}" if near else "run.sites() lists them"
    return SelectionError(f"the run has no site {site!r} among its {len(known)}; {hint}", nearest=near)


def no_such_statistic(owner: str, statistic: str, known: Sequence[str]) -> SelectionError:
    """Return the error for a statistic that a run or a site does not have."""
    near = tuple(difflib.get_close_matches(statistic, known, n=3, cutoff=0.3))
    has = ", ".join(known) or "tensors only"
    return SelectionError(f"{owner} has no statistic {statistic!r}; it has {has}", nearest=near)


def described_sites(listed: object) -> dict[str, dict[str, Any]]:
    """Return a list of sites' facts by name. Anything else in the list is ignored."""
    return {
        site["name"]: site
        for site in (listed if isinstance(listed, list) else [])
        if isinstance(site, dict) and isinstance(site.get("name"), str)
    }


# --- phases ---------------------------------------------------------------------------------------------------


def in_order(phases: Iterable[str]) -> list[str]:
    """Return the phases with training first, the others in the order of their records."""
    return sorted(phases, key=lambda phase: phase != TRAINING)


def first_phase(phases: Sequence[str], recorded: Collection[str]) -> str:
    """Return the first of a run's phases that is in ``recorded``; training if none is."""
    return next((phase for phase in in_order(phases) if phase in recorded), TRAINING)


def of_one_phase(refs: Sequence[TensorRef], phases: Sequence[str]) -> list[TensorRef]:
    """Return the tensors of each site in one phase, so that phases are never mixed."""
    if len(phases) <= 1:
        return list(refs)
    recorded: dict[str, set[str]] = {}
    for ref in refs:
        recorded.setdefault(ref.site, set()).add(ref.phase)
    shown = {site: first_phase(phases, own) for site, own in recorded.items()}
    return [ref for ref in refs if ref.phase == shown[ref.site]]


def no_such_phase(path: str, phase: str, known: Sequence[str]) -> SelectionError:
    """Return the error for a phase that a run does not have."""
    has = ", ".join(known) or "no records"
    return SelectionError(f"the run at {path} has no phase {phase!r}; it has {has}", nearest=tuple(known))


# --- texts ----------------------------------------------------------------------------------------------------


def _facts(run: Run) -> dict[str, str]:
    steps = run.steps()
    facts = {
        "steps": f"{len(steps)} ({steps[0]} to {steps[-1]})" if len(steps) else "none",
        "sites": str(len(run.sites())),
        "status": run.status,
    }
    if len(run.ranks) > 1:
        facts["ranks"] = (
            f"{len(run.ranks)}" if run.shown_rank is None else f"{run.shown_rank} of {len(run.ranks)}"
        )
    if len(run.attempts) > 1:
        facts["attempts"] = str(len(run.attempts))
    if problems := run.problems:
        facts["problems"] = f"{len(problems)}: {problems[0]}"
    return facts


def run_text(run: Run) -> str:
    """Describe a run in one line."""
    facts = _facts(run)
    return shown(
        f"<Run {run.path}: " + "; ".join(f"{name} {fact}" for name, fact in facts.items()) + ">", 2000
    )


def compact(value: float) -> str:
    """Format a number in at most seven characters: 0.0181, 267, -2.4e-5."""
    text = f"{value:.3g}"
    return (
        text if len(text) <= 7 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    )


# --- earlier attempts -----------------------------------------------------------------------------------------


def recorded_steps(run: str | os.PathLike[str], rank: int) -> range:
    """Return the range of steps that earlier attempts of a rank have recorded, from the names of the files alone.

    Empty if there are none or the folder cannot be read.
    """
    path = os.fspath(run)
    try:
        part = folder_of(path).child(rank_folder(rank))
        attempts = [number for name in part.names() if (number := parse_attempt(name)) is not None]
        found = [
            segment
            for number in attempts
            for name in part.child(attempt_folder(number)).names()
            if (segment := parse_segment(name)) is not None and segment.kind == "scalars"
        ]
    except OSError:
        return range(0)
    if not found:
        return range(0)
    return range(min(segment.low for segment in found), max(segment.high for segment in found) + 1)
