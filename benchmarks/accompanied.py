"""Trainings that are accompanied all the time: the flight recorder, the plan of ``torchtap run``, and ``update``.

The GPT of the tables (12 blocks of width 384), one torch thread, CPU time. ``torchtap run`` records every tenth step,
and more seldom where that takes more than its share, so a round is ten steps of it against ten plain ones. Rows by the
share inside torchtap begin with the first step and are less blurred by the machine.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torchtap as tt
from benchmarks.inside import row_of_share
from benchmarks.models import Training, gpt_training, mlp_training
from benchmarks.steps import judged, watched
from benchmarks.timing import Case, case, compare, one_thread
from torchtap.integrations.zero_code.recording import taps_of
from torchtap.integrations.zero_code.settings import Settings

__all__ = ["run"]

UPDATES = (tt.tap("*:update"),)
ARMED, DEFAULT, UPDATE = (
    "flight recorder, armed",
    "plan of torchtap run",
    "update of every parameter, every step",
)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of both models."""
    with one_thread(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        gpt, mlp = gpt_training(), mlp_training()
        rounds = 3 if quick else 9
        single = compare(
            {
                "plain": case(gpt.step),
                "plain again": case(gpt.step),
                ARMED: _armed(gpt),
                UPDATE: watched(gpt, UPDATES),
            },
            base="plain",
            rounds=rounds,
        )
        tens = compare(
            {"ten plain": case(_times(gpt.step, 10)), DEFAULT: _recorded(gpt, folder)},
            base="ten plain",
            rounds=2 if quick else 5,
            warm_up=0,
        )
        small = compare(
            {"plain": case(mlp.step), ARMED: _armed(mlp), UPDATE: watched(mlp, UPDATES)},
            base="plain",
            rounds=rounds,
            repeats=3,
        )
        model = "GPT 12 × 384"
        return [
            *judged(model, single, {ARMED: 1.02}),
            *judged(model, tens, {DEFAULT: 1.02}),
            row_of_share(model, ARMED, lambda: _recorder(gpt), gpt.step, 8, 1.02),
            row_of_share(model, DEFAULT, lambda: _watch(gpt, folder), gpt.step, 20, 1.02),
            *judged("MLP 50 × 256", small, {}),
        ]


def _recorder(training: Training) -> tt.FlightRecorder:
    return tt.flight_recorder(training.model, training.optimizer, "never-made")


def _watch(training: Training, folder: str) -> tt.Watch:
    """Under the default plan of ``torchtap run``."""
    made = tt.watch(training.model, tempfile.mkdtemp(dir=folder), taps_of(Settings()))
    return made.follow(training.optimizer)


def _armed(training: Training) -> Case:
    """Steps under an armed recorder, which finds nothing wrong."""

    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        with _recorder(training):
            training.glance()
            yield training.step

    return entered


def _recorded(training: Training, folder: str) -> Case:
    """Ten steps under the default plan of ``torchtap run``, which has been running for a while."""

    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        with _watch(training, folder):
            training.step()
            yield _times(training.step, 10)

    return entered


def _times(step: Callable[[], None], count: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            step()

    return several
