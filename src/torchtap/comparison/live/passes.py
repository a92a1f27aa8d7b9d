"""Run a model beside a reference's recorded pass, freely or with the reference's values forced in.

A *free* pass lets a model run on its own values. A *forced* pass hands every module the reference's own inputs
and, after looking at what it returned, puts the reference's outputs in its place. What a forced pass shows at a
site is therefore the work of one module alone: a leaf's own arithmetic, or what a container's code does between
its children. An error that came from elsewhere cannot be seen there. One forward tests every module that way.

Not here: recording the reference (`tracing`), which error is too large (`floor`), whose fault it is (`verdict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.live.hooked import steady, visiting
from torchtap.comparison.live.tracing import Feed, Trace, default_dtype, jitter
from torchtap.comparison.measure.measures import Measures, measure
from torchtap.names import read_name
from torchtap.taps.walk.leaves import input_leaves, leaves
from torchtap.taps.walk.structure import map_inputs, map_leaves
from torchtap.taps.walk.visit import Call

__all__ = ["Probe"]


@final
class Probe:
    """Runs a model beside a reference's trace and measures, site by site, how far it is from it."""

    def __init__(
        self, trace: Trace, names: Mapping[str, str] | None = None, *, seed: int = 0, brief: bool = True
    ) -> None:
        self._brief = brief
        self._trace = trace
        self._names = names  # this model's module path -> the reference's; None: the same
        self._seed = seed
        self._expected: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
        for event in trace.events:
            name = read_name(event.site)
            key = (event.module, event.kind, name.call)
            self._expected.setdefault(key, []).append((name.leaf, event.site))
        self._clear()

    def _clear(self) -> None:
        self.measures: dict[str, Measures] = {}
        self.unlike: dict[str, str] = {}  # site -> why its value could not be measured
        self.dtypes: dict[str, torch.dtype] = {}
        self.replaced: dict[str, Tensor] = {}  # the model's own values where `healed` put others in place
        self._forced = False
        self._heal: frozenset[str] = frozenset()
        self._noise: torch.Generator | None = None
        self._noise_outputs = False
        self._cast: torch.dtype | None = None

    def free(
        self, model: nn.Module, feed: Feed, *, noise: int | None = None, cast: torch.dtype | None = None
    ) -> Probe:
        """Let the model run on its own values; with ``noise`` each module's output is moved by about one ULP."""
        self._clear()
        self._noise_outputs = noise is not None
        self._cast = cast
        return self._run(model, feed, noise)

    def forced(
        self, model: nn.Module, feed: Feed, *, noise: int | None = None, cast: torch.dtype | None = None
    ) -> Probe:
        """Hand each module the reference's inputs (with ``noise``, moved by about one ULP).

        ``cast`` is the dtype that the model computes in where that is not its inputs' (a float64 copy).
        """
        self._clear()
        self._forced = True
        self._cast = cast
        return self._run(model, feed, noise)

    def healed(self, model: nn.Module, feed: Feed, sites: Iterable[str]) -> Probe:
        """Let the model run, but put the reference's values in place of its own at some sites."""
        self._clear()
        self._heal = frozenset(sites)
        return self._run(model, feed, None)

    def _run(self, model: nn.Module, feed: Feed, noise: int | None) -> Probe:
        if noise is not None:
            self._noise = torch.Generator().manual_seed(noise)
        with steady(model), default_dtype(self._cast):
            torch.manual_seed(self._seed)
            with visiting(model, self, None if self._names is None else self._names.__contains__):
                feed(model)
        return self

    # The visitor's side.

    def before(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        instead = self._look(call, "input", list(input_leaves(call.input_names, args, kwargs)))
        if not instead:
            return None
        return map_inputs(call.input_names, args, kwargs, lambda leaf, t: instead.get(leaf, t))

    def after(self, call: Call, output: Any) -> Any:
        instead = self._look(call, "output", list(leaves(output)))
        if not instead:
            return None
        return map_leaves(output, lambda leaf, t: instead.get(leaf, t))

    def _look(self, call: Call, kind: str, found: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        path = call.path if self._names is None else self._names[call.path]
        expected = self._expected.get((path, kind, call.number), [])
        by_leaf = dict(expected)
        if {leaf for leaf, _ in found} != set(by_leaf) and len(found) == len(expected):
            # Another class may name its arguments differently; their order still says which is which.
            by_leaf = {leaf: site for (leaf, _), (_, site) in zip(found, expected, strict=True)}
        instead: dict[str, Tensor] = {}
        for leaf, value in found:
            site = by_leaf.get(leaf)
            if site is None:
                continue
            reference = self._trace.values[site]
            if reference.shape != value.shape:
                self.unlike[site] = f"shapes differ: {tuple(reference.shape)} and {tuple(value.shape)}"
                continue
            self.dtypes[site] = value.dtype
            self.measures[site] = measure(reference, value.detach(), brief=self._brief)
            if site in self._heal:
                self.replaced[site] = value.detach().clone()
            if self._forced or site in self._heal:
                put = reference.to(value.device, self._cast_of(value.dtype))
                if self._noise is not None and kind == "input":
                    put = jitter(put, self._noise)
                elif put.data_ptr() == reference.data_ptr():
                    put = put.clone()  # the trace is not the model's to change in place
                instead[leaf] = put
            elif self._noise_outputs and self._noise is not None and kind == "output":
                instead[leaf] = jitter(value, self._noise)
            elif value.dtype != self._cast_of(value.dtype):
                instead[leaf] = value.to(self._cast_of(value.dtype))
        return instead

    def _cast_of(self, dtype: torch.dtype) -> torch.dtype:
        return self._cast if self._cast is not None and dtype.is_floating_point else dtype
