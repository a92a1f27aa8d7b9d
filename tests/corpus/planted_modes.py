"""The planted faults in every way of comparing: live, and from recordings that keep more or less.

    python -m tests.corpus.planted_modes [every]

With ``every`` only each so manieth case of each way is run. Ports are compared live, without rules.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.corpus.planted_everywhere import EVERYWHERE_FAULTS
from tests.corpus.planted_faults import FRACTIONS, Case, Outcome, at_depth, cases, everywhere, judge, summary
from tests.corpus.planted_ports import PORTS, make_port
from torch import nn

import torchtap as tt

__all__ = ["MODES", "port_outcomes", "run_mode"]

# Changes that alter what is recorded without altering the result: from recordings they are seen, and said to stay
# inside; or precisions, which only a live reference can be brought to.
LIVE_ONLY = ("permuted hidden units", "folded norm", "all in bfloat16", "weights in int8")


def _run(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _tensors(*selectors: str) -> Callable[..., Any]:
    """Compare what captures of both keep whole."""

    def compare(reference: nn.Module, target: nn.Module, inputs: Any) -> Any:
        kept = []
        for model in (reference, target):
            with torch.no_grad(), tt.capture(model, *selectors) as seen:
                _run(model, inputs)
            kept.append({name: seen[name] for name in seen})
        return tt.compare(kept[0], kept[1])

    return compare


def _statistics(reference: nn.Module, target: nn.Module, inputs: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("a", reference), ("b", target)):
            taps = [tt.tap("*:output", keep=tt.Stats()), tt.tap("*:input", keep=tt.Stats())]
            with tt.watch(model, Path(folder) / name, taps) as watch, torch.no_grad(), watch.step():
                _run(model, inputs)
        return tt.compare(Path(folder) / "a", Path(folder) / "b")


MODES: dict[str, Callable[..., Any]] = {
    "live": tt.compare,
    "recorded inputs and outputs": _tensors("*:input", "*:output"),
    "recorded outputs": _tensors("*:output"),
    "recorded statistics": _statistics,
}


def run_mode(mode: str, every: int = 1) -> list[Outcome]:
    """All cases in one way of comparing."""
    chosen = [*cases(), *everywhere()][::every]
    if mode != "live":
        chosen = [case for case in chosen if case.change not in LIVE_ONLY]
    found = (judge(case, MODES[mode]) for case in chosen)
    return [outcome for outcome in found if outcome is not None]


def port_outcomes(every: int = 1) -> list[Outcome]:
    """Each port as it is, and with faults in it."""
    found = (_port(case) for case in list(_port_cases())[::every])
    return [outcome for outcome in found if outcome is not None]


def _port_cases() -> Iterator[Case]:
    for name in PORTS:
        yield Case(name, "as it is", "", lambda model, block: "", True)
        for n, (change, plant) in enumerate(EVERYWHERE_FAULTS.items()):
            if change in ("other activation", "container × 1.02", "shifted tokens"):
                continue  # a port may have no module for it
            depth = list(FRACTIONS)[n % len(FRACTIONS)]
            yield Case(name, change, depth, at_depth(plant, depth), False)


def _port(case: Case) -> Outcome | None:
    port = make_port(case.family)
    target = copy.deepcopy(port.target)
    with torch.no_grad():
        planted = case.plant(target, "")
    if planted is None:
        return None
    result = tt.compare(port.reference, target, inputs=port.inputs)
    named = None if result.first is None else result.first.module
    expected = None if case.harmless else port.names.get(planted, planted)
    if named is not None and expected is not None and "+" in expected and named != expected:
        outer, parts = expected.rpartition(".")[0], expected.rpartition(".")[2].split("+")
        expected = named if named in [f"{outer}.{part}" for part in parts] else expected
    sure = "" if result.first is None else result.first.sure
    return Outcome(case, expected, named, result.verdict, sure, result.outcome)


def main() -> None:
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for mode in MODES:
        print(f"== {mode}\n{summary(run_mode(mode, every))}\n", flush=True)
    print(f"== ports, live, no rules\n{summary(port_outcomes(every))}")


if __name__ == "__main__":
    main()
