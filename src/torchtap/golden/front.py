"""Record and check goldens.

    golden.record("gpt", model, inputs)              # once; commit tests/golden/gpt
    verdict = golden.check("gpt", model, inputs)     # later; verdict.same, print(verdict)

A check runs the model once. Only if a value is over the floor that was recorded with the golden, the noise is measured
on this machine as well: with perturbed values, a repetition, another number of threads.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

import torchtap
from torchtap.errors import CompareError
from torchtap.golden.judge import Verdict, judge
from torchtap.golden.observe import Observation, State, observe, observe_training, state_of
from torchtap.golden.sketch import Array, epsilon, sketch_rows
from torchtap.golden.store import Golden, folder_of, load, save
from torchtap.spi import environment, leaves, map_leaves

__all__ = ["check", "default_root", "record"]

_STEADY = 256  # units in the last place between two equal runs: sums whose order is left to the device
Floors = dict[str, float]
Model = nn.Module | Callable[[], Any]


def default_root(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of goldens: the one given, the variable TORCHTAP_GOLDEN_DIR, or ``tests/golden``."""
    return Path(given or os.environ.get("TORCHTAP_GOLDEN_DIR") or Path("tests", "golden"))


def record(
    name: str,
    model: Model,
    inputs: Any = None,
    *,
    steps: int = 0,
    root: Any = None,
    target: str | None = None,
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
    seen = run.observe()
    _refuse_nan(name, seen)
    if not any(key.startswith((":output", ":value")) for key in seen.sites):
        raise CompareError(f"golden {name!r}: the model returns no tensor, so there is nothing to compare")
    if unsteady := _unsteady(seen, run.observe()):
        raise CompareError(
            f"golden {name!r}: {unsteady}. Draw random numbers from the default generators of torch, numpy or random, "
            "and let a training's function return a new model each time"
        )
    floors = _floors(seen, [*(run.observe(seed) for seed in (1, 2, 3)), run.other_threads(), run.twin()])
    known = environment()
    made = {key: known[key] for key in ("torch", "python", "platform", "threads")}
    made |= {"torchtap": torchtap.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    kind = seen.modules[""].partition("(")[0]
    return save(
        Golden(name, kind, steps, seen, run.state(seen, {}), floors, target, made), default_root(root)
    )


def check(name: str, model: Model, inputs: Any = None, *, steps: int = 0, root: Any = None) -> Verdict:
    """Compare a model with its golden. The parameters are those of `record`.

    Raises `CompareError` if there is no golden, if it is damaged, or if it is of another kind of model.
    """
    golden = load(default_root(root), name)
    if golden.steps != steps:
        raise CompareError(f"golden {name!r} is of {golden.steps} training steps, this check of {steps}")
    run = _Run(model, inputs, steps)
    _refuse_nan(f"{name} (recorded)", golden.seen)
    note = run.reorder(golden.seen.rows)
    seen = run.observe()
    seen.state = run.state(seen, golden.state)
    verdict = judge(golden, seen, golden.floors, "recorded with the golden")
    if not verdict.same:
        verdict = _again(golden, run, seen, verdict)
    return replace(verdict, notes=(*verdict.notes, note)) if note else verdict


def _again(golden: Golden, run: _Run, seen: Observation, doubted: Verdict) -> Verdict:
    """Judge with the noise that is measured on this machine; more of it if that is not enough."""
    moved, basis = run.observe(1), "values moved by one ULP, here and when recorded"
    floors = _floors(seen, [moved])
    verdict = judge(golden, seen, _larger(golden, seen, floors), basis)
    # Much more noise than there was may be a model that is not deterministic any more.
    if verdict.same and all(
        floors.get(key, 0.0) < 30 * max(floor, 1e-7) for key, floor in golden.floors.items()
    ):
        return verdict
    if unsteady := _unsteady(seen, run.observe()):
        return replace(doubted, cause=f"{unsteady}; {doubted.cause}")
    floors = _floors(seen, [moved, run.observe(2), run.other_threads()])
    return judge(golden, seen, _larger(golden, seen, floors), f"{basis}; other numbers of threads")


@final
@dataclass(slots=True)
class _Run:
    """The thing that is run: a model on its inputs, or a training."""

    model: Any
    inputs: Any
    steps: int

    def __post_init__(self) -> None:
        if not self.steps and (not isinstance(self.model, nn.Module) or self.inputs is None):
            raise CompareError(
                f"a golden needs an nn.Module and inputs=(x,), or a function and steps= for a training; not "
                f"{type(self.model).__name__} and {type(self.inputs).__name__}"
            )

        if not callable(self.inputs) and not isinstance(self.inputs, (tuple, dict)):
            self.inputs = (self.inputs,)

    def observe(self, seed: int | None = None) -> Observation:
        if self.steps:
            return observe_training(self.model, self.steps, seed)
        return observe(self.model, self.inputs, seed)

    def state(self, seen: Observation, known: State) -> State:
        return seen.state if self.steps else state_of(self.model, known)

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
            return observe(copy.deepcopy(self.model).double(), self.inputs, cast=torch.float64)
        except Exception:
            return None

    def reorder(self, rows: dict[str, Array]) -> str:
        """Put the batch into the order of the golden's, if it is the same batch in another order."""
        if self.steps or callable(self.inputs):
            return ""
        batches = [(leaf, value) for leaf, value in leaves(self.inputs) if leaf in rows and value.dim()]
        found = [(rows[leaf], sketch_rows(value)) for leaf, value in batches]
        alike = [pair for pair in found if pair[0].shape == pair[1].shape == found[0][0].shape]
        order = _order(*(np.hstack(side) for side in zip(*alike, strict=True))) if alike else []
        if order == sorted(order):
            return ""

        def sorted_rows(_: str, value: Tensor) -> Tensor:
            return value[torch.tensor(order)] if value.dim() and len(value) == len(order) else value

        self.inputs = map_leaves(self.inputs, sorted_rows)
        return "the batch is in another order; it was compared in the golden's"


def _order(old: Array, new: Array) -> list[int]:
    """Return the place of each row of the golden's batch in this one; nothing if one is missing."""
    limit, left, order = 1e-6 * np.abs(old).max(0), list(range(len(new))), []
    for number, row in enumerate(old):
        alike = [each for each in left if (np.abs(new[each] - row) <= limit).all()]
        if not alike:
            return []
        order.append(number if number in alike else alike[0])
        left.remove(order[-1])
    return order


def _floors(seen: Observation, runs: list[Observation | None]) -> Floors:
    """Return the largest harmless difference of each site."""
    floors: Floors = {}
    for other in runs:
        for key, site in (other.sites if other is not None else {}).items():
            error = seen.sites[key].sketch.distance(site.sketch) if key in seen.sites else np.inf
            # A place that is not finite in one of two right runs shows nothing of its size.
            floors[key] = max(floors.get(key, 0.0), error if np.isfinite(error) else 0.0)
    return floors


def _larger(golden: Golden, seen: Observation, floors: Floors) -> Floors:
    """Return the recorded floors or those measured here. The noise of a lower precision does not count."""
    found = dict(golden.floors)
    for key in found:
        if key in floors and golden.seen.sites[key].sketch.dtype == seen.sites[key].sketch.dtype:
            found[key] = max(found[key], floors[key])
    return found


def _refuse_nan(name: str, seen: Observation) -> None:
    bad = [key for key, site in seen.sites.items() if site.sketch.nans]
    if any(key.startswith((":output", ":value")) for key in bad):
        raise CompareError(
            f"golden {name!r}: the results are NaN, first at {bad[0]}. Such a run is no reference, because everything "
            "agrees with it. `torchtap.find_nan` finds the cause"
        )


def _unsteady(seen: Observation, again: Observation) -> str:
    """Describe the first difference between two equal runs; nothing if there is none."""
    for key, site in seen.sites.items():
        error = site.sketch.distance(again.sites[key].sketch) if key in again.sites else np.inf
        if error > _STEADY * epsilon(site.sketch.dtype):
            return (
                f"the model is not deterministic: two runs with the same seed differ by {error:.2g} at {key}"
            )
    return ""
