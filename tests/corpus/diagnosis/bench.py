"""Train everything under a doctor and count: named first or second, at the right site, when, and false alarms."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from tests.corpus.diagnosis import data_faults, loop_faults, model_faults, number_faults
from tests.corpus.diagnosis.kit import Case, Kit
from tests.corpus.diagnosis.unlisted_faults import UNLISTED

__all__ = ["FAULTS", "UNLISTED", "Outcome", "tried", "warned"]

FAULTS: list[Case] = [*loop_faults.CASES, *data_faults.CASES, *model_faults.CASES, *number_faults.CASES]


@dataclass(frozen=True)
class Outcome:
    """What came of one fault with one seed."""

    number: str
    place: int | None  # among the findings, from 1
    located: bool
    late: int | None  # updates between the earliest possible alarm and the first
    twin_warnings: tuple[str, ...]
    seconds: float
    said: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Named first or second, with the right site."""
        return self.place is not None and self.place <= 2 and self.located


def train(work: Callable[[Kit], None], kit: Kit) -> Kit:
    """One training, to its end or to its own error."""
    torch.manual_seed(kit.seed)
    torch._dynamo.reset() if kit.compiled else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work(kit)
        finally:
            kit.close()
    return kit


def tried(case: Case, seed: int, *, compiled: bool = False) -> Outcome:
    """The sick training and its twin."""
    began = time.perf_counter()
    sick = train(case.train, Kit(seed, sick=True, compiled=compiled))
    seconds = time.perf_counter() - began
    twin = train(case.train, Kit(seed, sick=False, compiled=compiled))
    found = sick.findings()
    alarm = min((at for kind, at in sick.alarms.items() if kind in case.kinds), default=None)
    return Outcome(
        case.number,
        case.named(found),
        case.located(found),
        None if alarm is None else max(0, alarm - 1 - case.earliest),
        tuple(f"{each.kind} {each.site}" for each in twin.findings() if each.severity != "info"),
        seconds,
        tuple(f"{each.severity} {each.kind} {each.site} @{each.step}" for each in found),
    )


def warned(
    works: Iterable[tuple[str, Callable[[Kit], None]]], seed: int, *, compiled: bool = False
) -> list[str]:
    """The warnings and errors of healthy trainings."""
    said = []
    for name, work in works:
        kit = train(work, Kit(seed, sick=False, compiled=compiled))
        said += [f"{name} (seed {seed}): {each}" for each in kit.findings() if each.severity != "info"]
    return said
