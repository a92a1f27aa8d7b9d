"""The audit finds a tracker that is wrong, from the run alone: the tracker is broken in twenty ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.session import tracker as tracked
from torchtap.session.tracker import Assign, Leave, Pass, StepTracker

Break = Callable[[pytest.MonkeyPatch], None]


def train(folder: Path) -> tt.Run:
    """A loop with an evaluation, a pass without gradients, accumulation and logged numbers; then marked steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(model, folder, ["*:output", "*:param", "*:update"]) as watch:
            watch.follow(optimizer)
            for step in range(6):
                with torch.no_grad():
                    model(torch.randn(3, 4))
                optimizer.zero_grad()
                for _ in range(2):
                    loss = model(torch.randn(3, 4)).pow(2).mean()
                    loss.backward()
                optimizer.step()
                watch.log(loss=loss)
                if step % 2:
                    model.eval()
                    model(torch.randn(3, 4))
                    model.train()
            for _ in range(2):
                with watch.step():
                    model(torch.randn(3, 4)).sum().backward()
                    optimizer.step()
    return tt.open(folder)


def wrap(name: str, made: Callable[[Any], Any]) -> Break:
    return lambda patch: patch.setattr(StepTracker, name, made(getattr(StepTracker, name)))


def actions(change: Callable[[list[Any]], list[Any]]) -> Break:
    """Break what the tracker decides."""

    def made(original: Any) -> Any:
        return lambda self: change(original(self))

    return wrap("actions", made)


def shift(by: int, only: Callable[[Assign], bool] = lambda each: True) -> Break:
    def change(made: list[Any]) -> list[Any]:
        return [
            each._replace(moment=replace(each.moment, step=max(0, each.moment.step + by)))
            if isinstance(each, Assign) and only(each)
            else each
            for each in made
        ]

    return actions(change)


def phase(before: str, after: str) -> Break:
    def change(made: list[Any]) -> list[Any]:
        return [
            each._replace(moment=replace(each.moment, phase=after))
            if isinstance(each, Assign) and each.moment.phase == before
            else each
            for each in made
        ]

    return actions(change)


def every_third(original: Any) -> Any:
    def note(self: StepTracker, optimizer: int, *, skipped: bool = False) -> None:
        self.calls = getattr(self, "calls", 0) + 1  # type: ignore[attr-defined]
        if self.calls % 3:  # type: ignore[attr-defined]
            original(self, optimizer, skipped=skipped)

    return note


def twice(original: Any) -> Any:
    def note(self: StepTracker, optimizer: int, *, skipped: bool = False) -> None:
        original(self, optimizer, skipped=skipped)
        original(self, optimizer, skipped=skipped)

    return note


def never_ends(original: Any) -> Any:
    def end(self: StepTracker) -> None:
        if self.updates % 2:
            original(self)

    return end


def drop(kind: Callable[[Any], bool]) -> Break:
    return actions(lambda made: [each for each in made if not kind(each)])


def is_assign(each: Any, *phases: str) -> bool:
    return isinstance(each, Assign) and (not phases or each.moment.phase in phases)


def no_updates(made: list[Any]) -> list[Any]:
    return [each._replace(updates=()) if isinstance(each, Leave) else each for each in made]


def reverse_updates(made: list[Any]) -> list[Any]:
    return [
        each._replace(updates=tuple(replace(u, number=u.number + 1) for u in each.updates))
        if isinstance(each, Leave)
        else each
        for each in made
    ]


def forgets_backward(original: Any) -> Any:
    return lambda self, evidence: "eval" if self.named is None and self.backward else original(self, evidence)


def all_train(original: Any) -> Any:
    return lambda self, evidence: "train"


BREAKS: dict[str, Break] = {
    "every third update is dropped": wrap("note_update", every_third),
    "every update counts twice": wrap("note_update", twice),
    "every second update ends no step": wrap("end_update", never_ends),
    "everything is one step late": shift(1),
    "everything is one step early": shift(-1),
    "training passes are one step late": shift(1, lambda each: each.moment.phase == "train"),
    "evaluations are two steps late": shift(2, lambda each: each.moment.phase == "eval"),
    "evaluations are two steps early": shift(-2, lambda each: each.moment.phase == "eval"),
    "passes that only run forward are one step early": shift(-1, lambda each: each.moment.phase == "forward"),
    "training is called evaluation": phase("train", "eval"),
    "training is called forward": phase("train", "forward"),
    "evaluation without gradients is called training": phase("forward", "train"),
    "assignments are lost": drop(is_assign),
    "evaluations are lost": drop(lambda each: is_assign(each, "eval")),
    "steps are never left": drop(lambda each: isinstance(each, Leave)),
    "updates are left out of their steps": actions(no_updates),
    "updates are counted from one": actions(reverse_updates),
    "everything is assigned twice": actions(
        lambda made: [each for one in made for each in ((one, one) if isinstance(one, Assign) else (one,))]
    ),
    "a backward makes an evaluation": lambda patch: patch.setattr(
        tracked.Pass, "phase", forgets_backward(Pass.phase)
    ),
    "every pass is training": lambda patch: patch.setattr(tracked.Pass, "phase", all_train(Pass.phase)),
}


def test_a_right_tracker_passes_the_audit(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert run.problems == []
    (audit,) = run.events("audit")
    assert audit["failed"] == []
    assert audit["updates"] == 8


def test_at_least_nineteen_of_twenty_broken_trackers_are_problems_of_the_run(tmp_path: Path) -> None:
    unnoticed = []
    for number, (name, broken) in enumerate(BREAKS.items()):
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            run = train(tmp_path / str(number))
        if not any("audit" in each for each in run.problems):
            unnoticed.append(name)
    assert len(BREAKS) == 20
    assert len(unnoticed) <= 1, unnoticed
