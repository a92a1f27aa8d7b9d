"""How a run shows itself at a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.sanitize import shown

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["compact", "run_text"]


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
    """One line."""
    facts = _facts(run)
    return shown(
        f"<Run {run.path}: " + "; ".join(f"{name} {fact}" for name, fact in facts.items()) + ">", 2000
    )


def compact(value: float) -> str:
    """A number in at most seven characters, for a column of them: 0.0181, 267, -2.4e-5."""
    text = f"{value:.3g}"
    return (
        text if len(text) <= 7 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    )
