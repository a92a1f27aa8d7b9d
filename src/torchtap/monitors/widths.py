"""The refined coordinate check over widths: the growth of each term when a model is made wider.

In a correct parametrisation the size of a coordinate of ``(W_t - W_0) x_t`` does not depend on the width: its
exponent is 0 in every layer. `check_widths` trains the same model at several widths for a few steps and fits
the exponents; `plot_widths` draws them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap.errors import MonitorError, needing
from torchtap.monitors.coordinate_check import RefinedCoordinateCheck
from torchtap.monitors.module_monitor import ModuleMonitor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TERMS", "Setup", "WidthCheck", "check_widths", "plot_widths"]

TERMS = ("(W_t-W_0)x_t", "W_0(x_t-x_0)")


@final
@dataclass(frozen=True, slots=True)
class Setup:
    """A model of some width, its optimizer and its batches. ``loss`` gets the model's output and the target."""

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] = field(default=nn.functional.cross_entropy)


@final
@dataclass(frozen=True)
class WidthCheck:
    """The result: ``sizes[term][layer]`` has the root mean square of a coordinate at each width."""

    name: str
    widths: tuple[int, ...]
    steps: int
    sizes: Mapping[str, Mapping[str, tuple[float, ...]]]

    def exponents(self, term: str = TERMS[0]) -> dict[str, float]:
        """Return for each layer the power of the width that the term's size grows with; NaN if it is always 0."""
        return {layer: _slope(self.widths, sizes) for layer, sizes in self.sizes[term].items()}

    def worst(self, term: str = TERMS[0]) -> tuple[str, float]:
        """Return the layer that depends on the width most, and its exponent."""
        found = {layer: slope for layer, slope in self.exponents(term).items() if not math.isnan(slope)}
        if not found:
            return "", math.nan
        layer = max(found, key=lambda each: abs(found[each]))
        return layer, found[layer]


def check_widths(
    build: Callable[[int], Setup], widths: Sequence[int], *, steps: int = 5, name: str = "", seed: int = 0
) -> WidthCheck:
    """Train ``build(width)`` for a few steps at each width, and measure each layer's terms after the last one.

        check_widths(build, [64, 128, 256], steps=5).exponents()

    build: returns a `Setup` for a width.
    widths: at least two different ones.
    steps: training steps before the check.
    name: the title in a plot; the function's name by default.
    seed: set before each width.

    Returns a `WidthCheck`. Raises `MonitorError` for too few widths, steps or batches.
    """
    if len(set(widths)) < 2 or min(widths) < 1:
        raise MonitorError(
            f"widths {list(widths)}: a growth takes at least two different widths of 1 or more"
        )
    if steps < 1:
        raise MonitorError(f"steps={steps}: at step 0 nothing has changed yet; give 1 or more")
    trained = []
    for width in widths:
        torch.manual_seed(seed)
        trained.append(_train(build(width), steps))
    found = {term: _at_all_widths([each.get(term, {}) for each in trained]) for term in TERMS}
    return WidthCheck(name or getattr(build, "__name__", "model"), tuple(widths), steps, found)


def _at_all_widths(sizes: list[dict[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return the sizes of the layers that every width has."""
    common = [layer for layer in sizes[0] if all(layer in each for each in sizes)]
    return {layer: tuple(each[layer] for each in sizes) for layer in common}


def _train(setup: Setup, steps: int) -> dict[str, dict[str, float]]:
    model = setup.model
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: step == steps)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    coordinates: dict[str, int] = {}
    batches = iter(setup.batches)
    for step in range(steps + 1):
        try:
            inputs, targets = next(batches)
        except StopIteration:
            raise MonitorError(
                f"batches ended after {step}; {steps + 1} are needed for steps={steps}"
            ) from None
        monitor.begin_step(step)
        if step == steps:
            with torch.no_grad():
                reference(inputs)
        loss = setup.loss(model(inputs), targets)
        if step == steps:
            coordinates = {
                n: out.shape[-1] for n, out in check.module_outputs.items() if isinstance(out, Tensor)
            }
            check.refined_coordinate_check()
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        monitor.end_step()
    return _sizes(monitor.storage.get_step_metrics(steps), model, coordinates)


def _sizes(
    metrics: Mapping[str, float], model: nn.Module, coordinates: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Return the root mean squares of the layers that have weights of their own."""
    weighted = {
        name
        for name, module in model.named_modules()
        if not list(module.children()) and any(True for _ in module.parameters(recurse=False))
    }
    return {
        term: {
            layer: metrics[key] / math.sqrt(size)
            for layer, size in coordinates.items()
            if layer in weighted and (key := f"RCC {term}/{layer}/l2norm") in metrics
        }
        for term in TERMS
    }


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    positive = [(math.log(w), math.log(s)) for w, s in zip(widths, sizes, strict=True) if s > 0]
    if len(positive) < 2:
        return math.nan
    x, y = np.array(positive).T
    return float(np.polyfit(x, y, 1)[0])


def _draw(axis: Axes, check: WidthCheck, term: str, colors: dict[str, str]) -> None:
    """Draw one term of one check, a line for each layer."""
    slopes = check.exponents(term)
    for layer, sizes in check.sizes[term].items():
        if max(sizes) > 0:
            label = f"{layer}   width$^{{{slopes[layer]:+.2f}}}$"
            axis.plot(check.widths, sizes, marker="o", color=colors.get(layer), label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(check.widths, [str(width) for width in check.widths])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    if axis.lines:  # a term that is 0 at every width has none
        axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def plot_widths(checks: Sequence[WidthCheck], path: str | os.PathLike[str]) -> None:
    """Draw the checks side by side on shared axes. Flat lines are right, rising ones are not."""
    with needing("matplotlib", "plot", who="the plot"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    figure, axes = plt.subplots(
        len(TERMS), len(checks), figsize=(4.6 * len(checks), 7), sharex=True, sharey="row", squeeze=False
    )
    layers = list(dict.fromkeys(layer for check in checks for layer in check.sizes[TERMS[0]]))
    colors = {layer: f"C{place % 10}" for place, layer in enumerate(layers)}
    for (column, check), (row, term) in product(enumerate(checks), enumerate(TERMS)):
        _draw(axes[row][column], check, term, colors)
    for axis, check in zip(axes[0], checks, strict=True):
        axis.set_title(check.name)
    for axis in axes[-1]:
        axis.set_xlabel("width")
    for (axis, *_), term in zip(axes, TERMS, strict=True):
        axis.set_ylabel(f"size of a coordinate of ${term.replace('(x_t-x_0)', ' (x_t-x_0)')}$")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.3)  # room for the legends above the lines
    figure.suptitle(f"Refined coordinate check after {checks[0].steps} steps: flat is right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
