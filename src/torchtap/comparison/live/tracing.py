"""Record one pass of a live eager model: every value that goes in or out of a module, in order.

It guarantees:
- a recorded value is the one at that moment: later in-place changes do not reach it;
- a value that passes several sites unchanged is kept once.

Not here: a second model beside the recorded one (`passes`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import version_of
from torchtap.comparison.live.hooked import fresh, steady, visiting
from torchtap.errors import CompareError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import argument_name, input_leaves, leaves
from torchtap.hooks.structure import map_leaves
from torchtap.hooks.visit import Call
from torchtap.plan.names import site_name

__all__ = [
    "Called",
    "Feed",
    "Trace",
    "TracedValue",
    "Versions",
    "default_dtype",
    "feed_of",
    "golden_copy",
    "jitter",
    "record",
    "settings_of",
]

Feed = Callable[[Callable[..., Any]], Any]


@final
@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that passed: its site, and the module whose own code made it."""

    site: str
    module: str  # the module at whose border the value was seen
    kind: str  # "input" or "output"
    author: str | None  # for an input the module that made the call; None when the user did


@final
@dataclass(slots=True, eq=False)
class Called:
    """One call of one module: what a comparison needs to know of it besides its tensors."""

    module: str
    number: int
    parent: str | None
    at: int  # how many values had passed before it
    settings: dict[str, object]  # its arguments that are no tensors
    changes: tuple[str, ...] = ()  # its tensor arguments that it changed in place


@final
@dataclass(eq=False)
class Trace:
    """Everything that passed through a model's modules in one pass, in order."""

    values: dict[str, Tensor] = field(default_factory=dict)
    events: list[TracedValue] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    partial: bool = False  # whether only some of the sites were kept

    def add(self, event: TracedValue, value: Tensor) -> None:
        """Note one more value."""
        self.values[event.site] = value
        self.events.append(event)


def feed_of(inputs: Any, cast: torch.dtype | None = None) -> Feed:
    """How to run a model once: on a tuple of arguments, a mapping of keywords, one value, or by a function.

    With ``cast`` numbers among the inputs come in that dtype.
    """
    if callable(inputs) and not isinstance(inputs, (Tensor, nn.Module)):
        return lambda model: inputs(model)
    if cast is not None:
        inputs = map_leaves(inputs, _to(cast))
    if isinstance(inputs, Mapping):
        return lambda model: model(**{key: fresh(value) for key, value in inputs.items()})
    if isinstance(inputs, tuple):
        return lambda model: model(*fresh(inputs))
    return lambda model: model(fresh(inputs))


def _to(dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    return lambda _, value: value.to(dtype) if value.is_floating_point() else value


def record(
    model: nn.Module,
    feed: Feed,
    *,
    seed: int = 0,
    keep: Callable[[str], bool] | None = None,
    noise: int | None = None,
    cast: torch.dtype | None = None,
) -> Trace:
    """Run a model once and keep what went in and out of each module.

    With ``noise`` each module's output is moved by about one ULP; ``cast`` is the dtype of a copy that computes in
    another one than its inputs have.
    """
    recorder = _Recorder(keep, noise, cast)
    with steady(model), default_dtype(cast):
        torch.manual_seed(seed)
        with visiting(model, recorder):
            feed(model)
    if not recorder.trace.events:
        raise CompareError("the model ran, but none of its modules was called; there is nothing to compare")
    return recorder.trace


@final
class _Recorder:
    """Keeps what passes."""

    def __init__(
        self, keep: Callable[[str], bool] | None, noise: int | None, cast: torch.dtype | None
    ) -> None:
        self.trace = Trace(partial=keep is not None)
        self._keep = keep
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)
        self._cast = cast
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._open: list[tuple[Called, Versions]] = []

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        settings = settings_of(call.input_names, args, kwargs)
        called = Called(call.path, call.number, call.parent, len(self.trace.events), settings)
        given = list(input_leaves(call.input_names, args, kwargs, through_objects=False))
        self.trace.calls.append(called)
        self._open.append((called, Versions(given)))
        for leaf, value in given:
            site = site_name(call.path, "input", leaf, call.number)
            self._take(TracedValue(site, call.path, "input", call.parent), value)
        if self._cast is None or call.parent is not None:
            return None
        return map_leaves(args, _to(self._cast)), map_leaves(kwargs, _to(self._cast))

    def after(self, call: Call, output: object) -> Any:
        while self._open:
            called, versions = self._open.pop()
            if (called.module, called.number) == (call.path, call.number):
                called.changes = versions.changed()
                break
        for leaf, value in leaves(output, through_objects=False):
            site = site_name(call.path, "output", leaf, call.number)
            self._take(TracedValue(site, call.path, "output", call.path), value)
        noise = self._noise
        return None if noise is None else map_leaves(output, lambda _, value: jitter(value, noise))

    def _take(self, event: TracedValue, value: Tensor) -> None:
        if self._keep is not None and not self._keep(event.site):
            return
        version = version_of(value)
        known = self._known.get(id(value))
        if known is not None and known[0]() is value and known[1] == version >= 0:
            copied = known[2]
        else:
            copied = value.detach().clone()
            self._known[id(value)] = (weakref.ref(value), version, copied)
        self.trace.add(event, copied)


@final
class Versions:
    """Which of a call's tensors were changed in place while it ran."""

    def __init__(self, given: list[tuple[str, Tensor]]) -> None:
        self._given = [(leaf, value, version_of(value)) for leaf, value in given]

    def changed(self) -> tuple[str, ...]:
        """The leaves whose version went on."""
        return tuple(leaf for leaf, value, version in self._given if version_of(value) != version)


def settings_of(
    names: tuple[str, ...] | None, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """A call's plain arguments by name: numbers, flags and text; ``None`` and other objects say nothing."""
    given: dict[str, object] = {}
    for position, value in enumerate(args):
        given[argument_name(names, position)] = value
    given.update(kwargs)
    return {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that a forward makes for itself have to follow a copy of another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def jitter(value: Tensor, generator: torch.Generator) -> Tensor:
    """The value with each element moved up or down by about one unit in its last place; zeros stay."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.clone()
    real = torch.view_as_real(value) if value.is_complex() else value
    step = torch.finfo(real.dtype).eps
    sign = torch.randint(0, 2, real.shape, generator=generator, dtype=torch.int8).to(real.device)
    moved = (real.double() * (1.0 + step * (2.0 * sign - 1.0))).to(real.dtype)
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
        lines = str(error).splitlines() or [""]
        return None, f"no float64 copy could be made ({type(error).__name__}: {lines[0][:120]})"
