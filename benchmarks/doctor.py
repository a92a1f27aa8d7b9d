"""A training under a doctor beside the same training alone: the default plan, a live step, and a step off schedule.

The GPT of `benchmarks.steps`, one torch thread, CPU time. By default the first 50 steps are live, then one in ten. Of
the first ones four in a row are timed, after four others: what is dear is read in one of four. A row counts ten of the
later steps. Rules, probes and the loss of each step are in it. Rows by the share inside torchtap begin with the first
step of a training and are less blurred by the machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torchtap as tt
from benchmarks.inside import row_of_share
from benchmarks.models import Training, gpt_training
from benchmarks.steps import judged
from benchmarks.timing import Case, case, compare, one_thread

__all__ = ["run"]

_NEVER = 10**9
MODEL = "GPT 12 × 384"
FIRST, LATER, OFF = (
    "doctor, the first steps, all live",
    "doctor, later: one live step in ten",
    "doctor, off schedule",
)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each case."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = gpt_training()
        rounds = 3 if quick else 9
        first = compare(
            {
                "four plain steps": case(_times(training.step, 4)),
                "plain again": case(_times(training.step, 4)),
                FIRST: _under_doctor(training, 4, dense=50),
            },
            base="four plain steps",
            rounds=max(2, rounds // 2),
            warm_up=1,
        )
        ten = compare(
            {
                "ten plain steps": case(_times(training.step, 10)),
                LATER: _under_doctor(training, 10, dense=0),
            },
            base="ten plain steps",
            rounds=max(2, rounds // 3),
            warm_up=1,
        )
        single = compare(
            {"plain": case(training.step), OFF: _under_doctor(training, 1, dense=0, every=_NEVER)},
            base="plain",
            rounds=rounds,
            warm_up=2,
        )
        shares = [
            row_of_share(MODEL, name, _doctor(training, **options), training.step, steps, bar, before=before)
            for name, options, steps, bar, before in (
                (FIRST, {"dense": 50}, 12, 1.05, 0),
                (LATER, {"dense": 0}, 10, 1.05, 0),
                (OFF, {"dense": 0, "every": _NEVER}, 10, 1.005, 1),  # the first step is always live
            )
        ]
    bars = {FIRST: 1.05, LATER: 1.05, OFF: 1.005}
    return [*judged(MODEL, {**first, **ten, **single}, bars), *shares]


def _times(work: Callable[[], Any], count: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


def _doctor(training: Training, *, dense: int, every: int = 10) -> Callable[[], tt.Doctor]:
    def opened() -> tt.Doctor:
        return tt.doctor(training.model, training.optimizer, every=every, dense=dense, share=None, quiet=True)

    return opened


def _under_doctor(training: Training, steps: int, *, dense: int, every: int = 10) -> Case:
    @contextmanager
    def entered() -> Iterator[Callable[[], Any]]:
        with _doctor(training, dense=dense, every=every)():
            yield _times(training.step, steps)

    return entered
