"""A training under a doctor beside the same training alone: the default plan, a live step, and a step off schedule.

The GPT of `benchmarks.steps`, one torch thread, CPU time. The default plan is one live step in ten; its row counts ten
steps. "Each step live" is what the first steps of a training cost. Rules, probes and the loss of each step are in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torchtap as tt
from benchmarks.models import Training, gpt_training
from benchmarks.steps import judged
from benchmarks.timing import Case, case, compare, one_thread

__all__ = ["run"]

_NEVER = 10**9


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each case."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = gpt_training()
        rounds = 3 if quick else 9
        single = compare(
            {
                "plain": case(training.step),
                "plain again": case(training.step),
                "doctor, each step live": _under_doctor(training, 1, every=1),
                "doctor, off schedule": _under_doctor(training, 1, every=_NEVER),
            },
            base="plain",
            rounds=rounds,
            warm_up=2,
        )
        ten = compare(
            {
                "ten plain steps": case(_times(training.step, 10)),
                "doctor, default plan, ten steps": _under_doctor(training, 10, every=10),
            },
            base="ten plain steps",
            rounds=max(2, rounds // 3),
            warm_up=1,
        )
    bars = {"doctor, off schedule": 1.005, "doctor, default plan, ten steps": 1.05}
    return judged("GPT 12 × 384", {**single, **ten}, bars)


def _times(work: Callable[[], Any], count: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


def _under_doctor(training: Training, steps: int, *, every: int) -> Case:
    @contextmanager
    def entered() -> Iterator[Callable[[], Any]]:
        with tt.doctor(training.model, training.optimizer, every=every, dense=0, share=None, quiet=True):
            yield _times(training.step, steps)

    return entered
