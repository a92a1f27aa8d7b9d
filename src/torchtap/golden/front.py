"""Record and check goldens.

    golden.record("gpt", model, inputs)              # once; commit tests/golden/gpt
    verdict = golden.check("gpt", model, inputs)     # later; verdict.same, print(verdict)

A check runs the model once. Only if a value is over the floor that was recorded with the golden, the noise is measured
on this machine as well: with perturbed values, a repetition, another number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import torchtap
from torchtap.comparison.passes import golden_copy
from torchtap.comparison.values import resolution
from torchtap.errors import CompareError
from torchtap.golden.judge import Verdict, judge
from torchtap.golden.observe import Observation, State, batch_of, observe_forward, observe_training
from torchtap.golden.store import Golden, folder_of, load, save
from torchtap.spi import environment, map_leaves

__all__ = ["check", "default_root", "record"]

_STEADY = 256  # units in the last place between two equal runs: sums whose order is left to the device
Model = nn.Module | Callable[[], Any]


def default_root(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of goldens: the one given, the variable TORCHTAP_GOLDEN_DIR, or ``tests/golden``."""
    return Path(given or os.environ.get("TORCHTAP_GOLDEN_DIR") or Path("tests", "golden"))


def record(
    name: str, model: Model, inputs: Any = None, *, steps: int = 0, root: Any = None, target: str = ""
) -> Path:
    """Record a golden, and measure how much harmless noise moves each value. Return its folder.

    ``inputs``  a tuple of arguments, a mapping of keywords, one value, or a function of the model
    ``steps``   record a training: ``model`` is then a function that returns a new model and ``step(i)``, which does
                one step and returns the loss
    ``root``    the folder of all goldens, ``tests/golden``
    ``target``  ``file.py:function``, with which the command line finds the model again

    Raises `CompareError` if the model is not deterministic or its results are NaN.
    """
    run = _Run(model, inputs, steps)
    folder_of(default_root(root), name)
    seen = run.observe(known={})
    results = [each for key, each in seen.sites.items() if key.startswith((":output", ":value"))]
    if not results:
        raise CompareError(f"golden {name!r}: the model returns no tensor, so there is nothing to compare")
    if any(each.nans for each in results):
        first = next(key for key, each in seen.sites.items() if each.nans)
        raise CompareError(
            f"golden {name!r}: the results are NaN, first at {first}. Such a run is no reference, because everything "
            "agrees with it. `torchtap.find_nan` finds the cause"
        )
    if unsteady := _unsteady(seen, run.observe()):
        raise CompareError(
            f"golden {name!r}: {unsteady}. Draw random numbers from the default generators of torch, numpy or random, "
            "and let a training's function return a new model each time"
        )
    floors = _floors(seen, [*(run.observe(seed) for seed in (1, 2, 3)), run.other_threads(), run.twin()])
    made = {key: environment()[key] for key in ("torch", "python", "platform", "threads")}
    made |= {"torchtap": torchtap.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    kind = seen.modules[""].partition("(")[0]
    return save(Golden(name, kind, steps, seen, floors, target, made), default_root(root))


def check(name: str, model: Model, inputs: Any = None, *, steps: int = 0, root: Any = None) -> Verdict:
    """Compare a model with its golden. The parameters are those of `record`.

    Raises `CompareError` if there is no golden, if it is damaged, or if it is of another kind of model.
    """
    golden = load(default_root(root), name)
    if golden.steps != steps:
        raise CompareError(f"golden {name!r} is of {golden.steps} training steps, this check of {steps}")
    run = _Run(model, inputs, steps)
    note = run.reorder(golden.seen.batch)
    seen = run.observe(known=golden.seen.state)
    verdict = judge(golden, seen, golden.floors, "recorded with the golden")
    if not verdict.same:
        unsteady = _unsteady(seen, run.observe())
        floors = _floors(seen, [run.observe(1), run.observe(2), run.other_threads()], golden)
        again = judge(golden, seen, floors, "values moved by one ULP and other threads, here as well")
        # What is not deterministic any more has as much noise as difference.
        verdict = replace(verdict, cause=f"{unsteady}; {verdict.cause}") if unsteady else again
    return replace(verdict, notes=(*verdict.notes, note)) if note else verdict


@final
class _Run:
    """The thing that is run: a model on its inputs, or a training."""

    def __init__(self, model: Any, inputs: Any, steps: int) -> None:
        self._model, self._inputs, self._steps = model, inputs, steps
        if not steps and (not isinstance(model, nn.Module) or inputs is None):
            raise CompareError(
                f"a golden needs an nn.Module and inputs=(x,), or a function and steps= for a training; not "
                f"{type(model).__name__} and {type(inputs).__name__}"
            )

    def observe(self, seed: int | None = None, known: State | None = None) -> Observation:
        if self._steps:
            return observe_training(self._model, self._steps, seed)
        return observe_forward(self._model, self._inputs, seed, known=known)

    def other_threads(self) -> Observation:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(2 if before == 1 else 1)
            return self.observe()
        finally:
            torch.set_num_threads(before)

    def twin(self) -> Observation | None:
        """Return what a copy of the model in float64 shows; None if it has none."""
        try:
            copied, _ = golden_copy(self._model)
            return None if copied is None else observe_forward(copied, self._inputs, cast=torch.float64)
        except Exception:
            return None

    def reorder(self, wanted: list[int]) -> str:
        """Put the batch into the order of the golden's, if it is the same batch in another order."""
        batch = [] if self._steps else batch_of(self._inputs)
        if batch == wanted or sorted(batch) != sorted(wanted):
            return ""
        order = torch.tensor([batch.index(row) for row in wanted])

        def sorted_rows(_: str, value: Tensor) -> Tensor:
            return value[order.to(value.device)] if value.dim() and len(value) == len(order) else value

        self._inputs = map_leaves(self._inputs, sorted_rows)
        return "the batch is in another order; it was compared in the golden's"


def _floors(seen: Observation, runs: list[Observation | None], old: Golden | None = None) -> dict[str, float]:
    """Return the largest harmless difference of each site, here and in a golden."""
    floors = dict(old.floors) if old else {}
    before = old.seen.sites if old else seen.sites
    for other in runs:
        for key, error in _distances(seen, other) if other else ():
            # The noise of a lower precision does not count, nor does a place that is not finite in a right run.
            if math.isfinite(error) and key in before and before[key].dtype == seen.sites[key].dtype:
                floors[key] = max(floors.get(key, 0.0), error)
    return floors


def _distances(seen: Observation, other: Observation) -> Iterator[tuple[str, float]]:
    """Yield how far each value of another run is from this one's."""
    for key, each in seen.sites.items():
        yield key, each.distance(other.sites[key]) if key in other.sites else math.inf


def _unsteady(seen: Observation, again: Observation) -> str:
    """Describe the first difference between two equal runs; nothing if there is none."""
    for key, error in _distances(seen, again):
        if error > _STEADY * resolution(seen.sites[key].dtype):
            return (
                f"the model is not deterministic: two runs with the same seed differ by {error:.2g} at {key}"
            )
    return ""
