"""Passes of a live eager model: record one, then look at others beside it, freely or with its values forced in.

A *free* pass lets a model run on its own values. A *forced* pass hands every module the reference's own inputs
and, after looking at what it returned, puts the reference's outputs in its place. What a forced pass shows at a
site is therefore the work of one module alone: a leaf's own arithmetic, or what a container's code does between
its children. An error that came from elsewhere cannot be seen there. One forward tests every module that way.

It guarantees:
- a recorded value is the one at that moment: later in-place changes do not reach it;
- a value that passes several sites unchanged is kept once.

Not here: which error is too large (`floor`), whose fault it is (`verdict`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.hooked import Call, Hooked, fresh, rebuild, steady
from torchtap.comparison.measures import Measures, measure
from torchtap.errors import CompareError
from torchtap.taps.leaves import input_leaves, leaves

__all__ = ["Event", "Feed", "Probe", "Trace", "feed_of", "golden_copy", "jitter", "record"]

Feed = Callable[[Callable[..., Any]], Any]


@final
@dataclass(frozen=True, slots=True)
class Event:
    """A value that passed: its site, and the module whose own code made it."""

    site: str
    module: str  # the module at whose border the value was seen
    kind: str  # "input" or "output"
    author: str | None  # for an input the module that made the call; None when the user did


@final
@dataclass(eq=False)
class Trace:
    """Everything that passed through a model's modules in one pass, in order."""

    values: dict[str, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event, value: Tensor) -> None:
        self.values[event.site] = value
        self.events.append(event)


def site_name(path: str, kind: str, leaf: str, number: int) -> str:
    """The name of a site from its parts."""
    return f"{path}:{kind}{'.' if leaf else ''}{leaf}{f'#{number}' if number else ''}"


def feed_of(inputs: Any) -> Feed:
    """How to run a model once: on a tuple of arguments, a mapping of keywords, one value, or by a function."""
    if callable(inputs) and not isinstance(inputs, (Tensor, nn.Module)):
        return lambda model: inputs(model)
    if isinstance(inputs, Mapping):
        return lambda model: model(**{key: fresh(value) for key, value in inputs.items()})
    if isinstance(inputs, tuple):
        return lambda model: model(*fresh(inputs))
    return lambda model: model(fresh(inputs))


@final
class _Recorder:
    """Keeps what passes."""

    def __init__(self, keep: Callable[[str], bool] | None) -> None:
        self.trace = Trace()
        self._keep = keep
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def arrive(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf, value in input_leaves(call.input_names, args, kwargs):
            site = site_name(call.path, "input", leaf, call.number)
            self._take(Event(site, call.path, "input", call.parent), value)

    def leave(self, call: Call, output: Any) -> None:
        for leaf, value in leaves(output):
            site = site_name(call.path, "output", leaf, call.number)
            self._take(Event(site, call.path, "output", call.path), value)

    def _take(self, event: Event, value: Tensor) -> None:
        if self._keep is not None and not self._keep(event.site):
            return
        version = -1 if value.is_inference() else value._version
        known = self._known.get(id(value))
        if known is not None and known[0]() is value and known[1] == version >= 0:
            copied = known[2]
        else:
            copied = value.detach().clone()
            self._known[id(value)] = (weakref.ref(value), version, copied)
        self.trace.add(event, copied)


def record(
    model: nn.Module, feed: Feed, *, seed: int = 0, keep: Callable[[str], bool] | None = None
) -> Trace:
    """Run a model once and keep what went in and out of each module."""
    recorder = _Recorder(keep)
    with steady(model):
        torch.manual_seed(seed)
        with Hooked(model, recorder):
            feed(model)
    if not recorder.trace.events:
        raise CompareError("the model ran, but none of its modules was called; there is nothing to compare")
    return recorder.trace


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
            base, _, number = event.site.partition("#")
            leaf = base.rpartition(":")[2].partition(".")[2]
            key = (event.module, event.kind, int(number or 0))
            self._expected.setdefault(key, []).append((leaf, event.site))
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
        with steady(model), _default_dtype(self._cast):
            torch.manual_seed(self._seed)
            with Hooked(model, self, None if self._names is None else self._names.__contains__):
                feed(model)
        return self

    # The visitor's side.

    def arrive(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        instead = self._look(call, "input", list(input_leaves(call.input_names, args, kwargs)))
        if not instead:
            return None
        names = call.input_names
        changed_args = tuple(
            rebuild(value, lambda leaf, t: instead.get(leaf, t), _argument_name(names, position))
            for position, value in enumerate(args)
        )
        lone = names == ("",)
        changed_kwargs = {
            key: rebuild(value, lambda leaf, t: instead.get(leaf, t), "" if lone else key)
            for key, value in kwargs.items()
        }
        return changed_args, changed_kwargs

    def leave(self, call: Call, output: Any) -> Any:
        instead = self._look(call, "output", list(leaves(output)))
        if not instead:
            return None
        return rebuild(output, lambda leaf, t: instead.get(leaf, t))

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


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that a forward makes for itself have to follow a copy of another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _argument_name(names: tuple[str, ...] | None, position: int) -> str:
    return names[position] if names is not None and position < len(names) else str(position)


def jitter(value: Tensor, generator: torch.Generator) -> Tensor:
    """The value with each element moved up or down by about one unit in its last place; zeros stay."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.clone()
    real = torch.view_as_real(value) if value.is_complex() else value
    step = torch.finfo(real.dtype).eps
    sign = torch.randint(0, 2, real.shape, generator=generator, dtype=torch.int8).to(real.device)
    wide = real.double()
    moved = (wide * (1.0 + step * (2.0 * sign - 1.0))).to(real.dtype)
    moved = torch.where(torch.isfinite(moved), moved, real)
    return torch.view_as_complex(moved) if value.is_complex() else moved


def golden_copy(model: nn.Module, *, most_bytes: int = 4 << 30) -> tuple[nn.Module | None, str]:
    """``(the model in float64, "")``, or ``(None, why there is none)``."""
    size = sum(p.numel() * 8 for p in model.parameters())
    if size > most_bytes:
        return None, f"a float64 copy would need {size / 2**30:.1f} GiB"
    try:
        return copy.deepcopy(model).double(), ""
    except Exception as error:
        return (
            None,
            f"no float64 copy could be made ({type(error).__name__}: {str(error).splitlines()[0][:120]})",
        )
