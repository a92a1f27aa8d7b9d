"""Record and check goldens.

    golden.record("gpt", model, inputs)              # once; commit tests/golden/gpt
    verdict = golden.check("gpt", model, inputs)     # later; verdict.same, print(verdict)

A check runs the model once. Only if a value is over the floor that was recorded with the golden, the noise is measured
on this machine as well: with perturbed values, a repetition, another number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchtap
from torchtap.comparison.passes import golden_copy
from torchtap.comparison.values import resolution
from torchtap.errors import CompareError
from torchtap.golden.judge import Verdict, judge
from torchtap.golden.observe import Observation, in_order_of, observe
from torchtap.golden.store import folder_of, load, save
from torchtap.spi import environment

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
    folder_of(default_root(root), name)  # refuses a bad name before anything is run
    run = partial(observe, model, inputs, steps)
    seen = run(known={})
    results = [each for key, each in seen.sites.items() if key.startswith((":output", ":value"))]
    if not results:
        raise CompareError(f"golden {name!r}: the model returns no tensor, so there is nothing to compare")
    if any(each.nans for each in results):
        first = next(key for key, each in seen.sites.items() if each.nans)
        raise CompareError(
            f"golden {name!r}: the results are NaN, first at {first}. Such a run is no reference, because everything "
            "agrees with it. `torchtap.find_nan` finds the cause"
        )
    if unsteady := _unsteady(seen, run()):
        raise CompareError(
            f"golden {name!r}: {unsteady}. Draw random numbers from the default generators of torch, numpy or random, "
            "and let a training's function return a new model each time"
        )
    runs = [*(run(seed=seed) for seed in (1, 2, 3)), _other_threads(run)]
    if isinstance(model, nn.Module):
        with suppress(Exception):  # a model that cannot run in float64 has the floor of the other runs
            runs.append(observe(golden_copy(model)[0], inputs, 0, cast=torch.float64))
    made = {key: environment()[key] for key in ("torch", "python", "platform", "threads")}
    made |= {"torchtap": torchtap.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    floors = _floors(seen, seen, runs)
    golden = replace(seen, name=name, steps=steps, floors=floors, target=target, made=made)
    return save(golden, default_root(root))


def check(name: str, model: Model, inputs: Any = None, *, steps: int = 0, root: Any = None) -> Verdict:
    """Compare a model with its golden. The parameters are those of `record`.

    Raises `CompareError` if there is no golden, if it is damaged, or if it is of another kind of model.
    """
    golden = load(default_root(root), name)
    if golden.steps != steps:
        raise CompareError(f"golden {name!r} is of {golden.steps} training steps, this check of {steps}")
    ordered = in_order_of(golden.batch, inputs)
    notes = [] if ordered is inputs else ["the batch is in another order; it was compared in the golden's"]
    run = partial(observe, model, ordered, steps)
    seen = run(known=golden.state)
    verdict = judge(golden, seen, golden.floors, "recorded with the golden", notes)
    if verdict.same:
        return verdict
    if unsteady := _unsteady(seen, run()):  # it has as much noise as difference
        return replace(verdict, cause=f"{unsteady}; {verdict.cause}")
    floors = _floors(golden, seen, [run(seed=1), run(seed=2), _other_threads(run)])
    return judge(golden, seen, floors, "values moved by one ULP and other threads, here as well", notes)


def _other_threads(run: Callable[[], Observation]) -> Observation:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        return run()
    finally:
        torch.set_num_threads(before)


def _floors(golden: Observation, seen: Observation, runs: list[Observation]) -> dict[str, float]:
    """Return the largest harmless difference of each site, in the golden and here."""
    floors = dict(golden.floors)
    for key, each in seen.sites.items():
        # The noise of a lower precision does not count, nor does a place that is not finite in a right run.
        if key in golden.sites and golden.sites[key].dtype == each.dtype:
            noise = (each.distance(other.sites[key]) for other in runs if key in other.sites)
            floors[key] = max([floors.get(key, 0.0), *filter(math.isfinite, noise)])
    return floors


def _unsteady(seen: Observation, again: Observation) -> str:
    """Describe the first difference between two equal runs; nothing if there is none."""
    for key, each in seen.sites.items():
        error = each.distance(again.sites[key]) if key in again.sites else math.inf
        if error > _STEADY * resolution(each.dtype):
            return (
                f"the model is not deterministic: two runs with the same seed differ by {error:.2g} at {key}"
            )
    return ""
