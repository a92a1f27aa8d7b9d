"""Mistakes in the code that crosses from a device to the host: each of them is caught by the campaign."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.device import lag
from tests.device.campaign import SCENARIOS, Program

from torchtap.reduce import device_copy, slots
from torchtap.reduce.device_copy import Crossing, line_to
from torchtap.reduce.stats import StatsBlock

# (class and method, what is replaced, by what, the scenario that sees it)
MISTAKES: dict[str, tuple[Any, str, str, str, str]] = {
    "a dropped event": (device_copy.Line, "copy", "side.wait_stream(other)", "pass", "watch_tensors"),
    "an event on the wrong stream": (
        device_copy.Line,
        "copy",
        "(side or stream).record_event()",
        "stream.record_event()",
        "watch_tensors",
    ),
    "a slot reused one step early": (slots.Round, "send", "beside=False", "beside=True", "watch"),
    "a read before the copy": (device_copy.Crossing, "done", "self._event.query()", "True", "watch"),
    "a copy that nobody waits for": (
        device_copy.Crossing,
        "wait",
        "self._event.synchronize()",
        "pass",
        "watch",
    ),
    "a source released too early": (
        device_copy.Crossing,
        "__init__",
        "self._sources = tuple(sources)",
        "self._sources = ()",
        "watch_tensors",
    ),
    "the wrong stream": (
        slots.DeviceSlots,
        "_take_stream",
        "stream.wait_stream(self._stream)",
        "pass",
        "branches",
    ),
    "a stream that is not noted": (
        device_copy.Line,
        "copy",
        "{stream, *self._noted}",
        "{stream}",
        "branches",
    ),
    "a stage that is sent unmeasured": (
        slots.DeviceSlots,
        "_send",
        "self._measure_stage(stage)",
        "pass",
        "watch",
    ),
    "padding that is counted": (slots._Stage, "put", "fill_(torch.nan)", "fill_(0.0)", "watch"),
    "a wait at each step": (
        slots.Round,
        "send",
        "Crossing([numbers], beside=False)",
        "Crossing([numbers], beside=False); self._crossing.wait()",
        "watch",
    ),
}


def mutated(owner: type, method: str, old: str, new: str) -> Any:
    """Return a method with a part of its text replaced."""
    module = inspect.getmodule(owner)
    assert module is not None
    source = inspect.getsource(module)
    text = inspect.getsource(getattr(owner, method))
    assert text.count(old) == 1, f"{old!r} is not in {method}"
    changed = types.ModuleType(module.__name__)
    exec(compile(source.replace(text, text.replace(old, new)), module.__name__, "exec"), changed.__dict__)
    made = getattr(getattr(changed, owner.__name__), method)
    method_of = types.FunctionType(
        made.__code__, module.__dict__, method, made.__defaults__, made.__closure__
    )
    method_of.__kwdefaults__ = made.__kwdefaults__
    return method_of


def problem(scenario: str) -> str:
    """Run a scenario under a few schedules, and return the first thing that is wrong."""
    for seed in (0, 1):
        program = Program(seed)
        vars(program).update(mean=200.0, depth=2, steps=3, parts=1, held=seed == 0, own_stream=False)
        try:
            found = list(branches(program) if scenario == "branches" else SCENARIOS[scenario](program))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        lag.settle()
        counts = lag.counts()
        found += [f"{counts[what]} {what}" for what in ("faults", "races") if counts[what]]
        if found:
            return found[0]
    return ""


def branches(program: Program) -> Iterator[str]:
    """Take values of a branch on another stream, which the training joins only after the copies began."""
    device, side = program.device, torch.Stream(program.device)
    lag.reset(program.seed, program.mean)
    block = StatsBlock(2)
    for _ in range(3):
        block.measure_into(0, 0, torch.full((1000,), 1.0, device=device))
        with side:
            value = torch.full((1000,), 2.0, device=device) * 3
            line_to(device).note()
            block.measure_into(1, 1, value)
        sent, arriving = Crossing([value]), block.hand_over()
        block.reset()
        if arriving is None or arriving.results()[:, 1].tolist() != [1, 6]:
            yield "other statistics"
        if not torch.equal(sent.wait()[0], torch.full((1000,), 6.0)):
            yield "another value"
        torch.accelerator.current_stream(device).wait_stream(side)


@pytest.mark.parametrize("scenario", ["watch", "watch_tensors", "branches"])
def test_without_a_mistake_nothing_is_wrong(scenario: str) -> None:
    assert problem(scenario) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new, scenario = MISTAKES[name]
    monkeypatch.setattr(owner, method, mutated(owner, method, old, new))
    caught = problem(scenario)
    print(name, "->", caught)
    assert caught, f"{name} was not caught"
