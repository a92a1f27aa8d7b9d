"""`torchtap.bisect`: find the first wrong module with little memory, from statistics to tensors to replaced inputs.

`torchtap.compare` keeps every value of the reference at once. A model whose values do not fit is bisected instead:

1. statistics of every site, one forward of each model and one of the reference under one-ULP noise: the first
   site whose statistics part is an upper bound for the fault;
2. whole tensors at a few sites below that bound, again and again, until few sites are left between the last that
   agrees and the first that does not (statistics can agree where values do not, as with swapped heads);
3. those sites alone, with the target's modules run on the reference's inputs, and the culprit's value replaced.

Not here: what makes a site diverge (`floor`), whose fault it is (`verdict`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.floor import Floor, floor_from
from torchtap.comparison.front import is_eager
from torchtap.comparison.judge import decide, status_of
from torchtap.comparison.live import gather, judge_live
from torchtap.comparison.measures import Measures
from torchtap.comparison.passes import Feed, TraceProbe, feed_of, jitter, record, steady, visiting
from torchtap.comparison.recordings import describe
from torchtap.comparison.result import Comparison, FirstDifference
from torchtap.comparison.rules import PairingRule
from torchtap.errors import CompareError
from torchtap.hooks.leaves import Args, Kwargs, input_leaves, leaves
from torchtap.hooks.visit import Call
from torchtap.plan.names import parent_path, path_of, site_name

__all__ = ["Bisection", "bisect"]

# Whole tensors held at a time while the range is narrowed, and the range at which narrowing ends.
_HELD = 8
_WINDOW = 24
# Statistics average over many elements: they part by less than the values do.
_STATISTICS_MARGIN = 8.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What a bisection found and how."""

    first: FirstDifference | None
    verdict: str
    forwards: int
    trail: tuple[str, ...]  # one sentence for each stage
    comparison: Comparison | None  # of the sites that were left at the end

    def __str__(self) -> str:
        return self.verdict


def bisect(
    reference: nn.Module, target: nn.Module, inputs: object, *, rules: tuple[str | PairingRule, ...] = ()
) -> Bisection:
    """Find the first module of ``target`` that is wrong, holding only a few values at a time."""
    for who, model in (("reference", reference), ("target", target)):
        if not is_eager(model):
            raise CompareError(
                f"bisect needs eager models; the {who} is {describe(model)}. Use compare for it"
            )
    work = _Work(reference, target, feed_of(inputs))
    low, high = work.by_statistics()
    if high is None:
        return work.nothing()
    low, high = work.by_tensors(low, high)
    return work.by_replacement(low, high, rules)


@final
class _Summaries:
    """Keeps three numbers of each value that passes: enough to see most faults, in almost no memory."""

    def __init__(self, noise: int | None = None) -> None:
        self.order: list[str] = []
        self.numbers: dict[str, tuple[float, float, float]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        for leaf, value in input_leaves(call.input_names, args, kwargs, through_objects=False):
            self._take(site_name(call.path, "input", leaf, call.number), value)

    def after(self, call: Call, output: object) -> Any:
        for leaf, value in leaves(output, through_objects=False):
            self._take(site_name(call.path, "output", leaf, call.number), value)
        if self._noise is not None and isinstance(output, Tensor):
            return jitter(output, self._noise)
        return None

    def _take(self, site: str, value: Tensor) -> None:
        wide = value.detach().to(torch.float64).reshape(-1)
        # Weights that differ from place to place tell a permuted value from the original.
        place = torch.arange(wide.numel(), dtype=torch.float64, device=wide.device)
        weighted = float((wide * torch.sin(place + 1.0)).sum()) if wide.numel() else 0.0
        self.order.append(site)
        self.shapes[site] = tuple(value.shape)
        self.numbers[site] = (
            float(wide.norm()) if wide.numel() else 0.0,
            weighted,
            float(wide.abs().max()) if wide.numel() else 0.0,
        )


@final
@dataclass(eq=False)
class _Work:
    """A bisection under way. Sites are numbered in the reference's order of execution."""

    reference: nn.Module
    target: nn.Module
    feed: Feed
    forwards: int = 0
    trail: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def by_statistics(self) -> tuple[int, int | None]:
        """``(0, first site whose statistics part)``; the last site when none does but the values may."""
        plain, noisy, theirs = _Summaries(), _Summaries(noise=1), _Summaries()
        for model, summaries in ((self.reference, plain), (self.reference, noisy), (self.target, theirs)):
            self._run(model, summaries)
        self.order = [site for site in plain.order if theirs.shapes.get(site) == plain.shapes[site]]
        if not self.order:
            raise CompareError("no site of the target has the name and shape of one of the reference")
        for at, site in enumerate(self.order):
            if _parted(plain.numbers[site], theirs.numbers[site], noisy.numbers.get(site)):
                self.trail.append(f"statistics of {len(self.order)} sites: the first to part is {site}")
                return 0, at
        self.trail.append(f"statistics of {len(self.order)} sites: none parts")
        return 0, None

    def by_tensors(self, low: int, high: int) -> tuple[int, int]:
        """Narrow ``(low, high]`` by whole tensors at a few sites at a time."""
        while high - low > _WINDOW:
            step = (high - low) / (_HELD + 1)
            chosen = sorted({low + round(step * n) for n in range(1, _HELD + 1)} - {high})
            names = [self.order[at] for at in chosen]
            diverged = self._diverged(set(names))
            first = next((at for at, site in zip(chosen, names, strict=True) if site in diverged), None)
            before = [at for at in chosen if first is None or at < first]
            low, high = max([low, *before]), high if first is None else first
            self.trail.append(
                f"tensors at {len(names)} sites: the fault is between {self.order[low]} and {self.order[high]}"
            )
        return low, high

    def by_replacement(self, low: int, high: int, rules: tuple[str | PairingRule, ...]) -> Bisection:
        """Run the modules of the sites that are left on the reference's inputs, and replace the culprit's value."""
        # A little on both sides: the inputs of the first suspect, and the border of the module around the last.
        names = self.order[max(0, low - 2) : high + 3]
        modules = {path_of(name) for name in names}
        outer = {parent_path(path) for path in modules}
        wanted = {site for site in self.order if path_of(site) in modules | outer}
        found = gather(self.reference, self.target, self.feed, rules=rules, keep=wanted.__contains__)
        rows, first = judge_live(found)
        self.forwards += found.forwards
        self.trail.append(
            f"replaced inputs at {len(rows)} sites: {'none' if first is None else first.module} is wrong"
        )
        outcome, verdict = decide(first, rows, found.alignment.unaligned, live=True)
        result = Comparison(
            reference=describe(self.reference),
            target=describe(self.target),
            rows=rows,
            first=first,
            verdict=verdict,
            basis=", ".join(found.basis),
            unaligned=found.alignment.unaligned,
            outcome=outcome,
            problems=tuple(found.problems),
            forwards=self.forwards,
        )
        return Bisection(
            first=first,
            verdict=f"{verdict} Found with {self.forwards} forwards.",
            forwards=self.forwards,
            trail=tuple(self.trail),
            comparison=result,
        )

    def nothing(self) -> Bisection:
        return Bisection(
            first=None,
            verdict=f"No divergence: the statistics of all {len(self.order)} sites agree within the reference's own "
            f"noise. Found with {self.forwards} forwards.",
            forwards=self.forwards,
            trail=tuple(self.trail),
            comparison=None,
        )

    def _diverged(self, sites: set[str]) -> set[str]:
        trace = record(self.reference, self.feed, keep=sites.__contains__)
        noisy = TraceProbe(trace).free(self.reference, self.feed, noise=1).measures
        theirs = TraceProbe(trace).free(self.target, self.feed).measures
        self.forwards += 3
        return {
            site
            for site, measures in theirs.items()
            if self._over(measures, noisy.get(site), trace.values[site])
        }

    def _over(self, measures: Measures, noise: Measures | None, value: Tensor) -> bool:
        floor = floor_from([("one ULP", noise)], value.dtype, value.dtype) or Floor(0.0, 0.0, ())
        return status_of(measures, floor)[0] == "diverged"

    def _run(self, model: nn.Module, visitor: _Summaries, only: Callable[[str], bool] | None = None) -> None:
        with steady(model):
            torch.manual_seed(0)
            with visiting(model, visitor, only):
                self.feed(model)
        self.forwards += 1


def _parted(
    mine: tuple[float, float, float],
    theirs: tuple[float, float, float],
    noisy: tuple[float, float, float] | None,
) -> bool:
    scale = mine[0] if mine[0] > 0 else 1.0
    noise = [
        0.0 if not math.isfinite(n) else abs(n - a) / scale for a, n in zip(mine, noisy or mine, strict=True)
    ]
    return any(_far(*each, scale) for each in zip(mine, theirs, noise, strict=True))


def _far(mine: float, theirs: float, noise: float, scale: float) -> bool:
    if mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
        return False
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return True
    return abs(mine - theirs) / scale > _STATISTICS_MARGIN * max(noise, 1e-6)
