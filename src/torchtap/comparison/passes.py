"""Run a model beside a reference's recorded pass, freely or with the reference's values forced in.

A *free* pass lets a model run on its own values. A *forced* pass hands every module the reference's own inputs
and, after looking at what it returned, puts the reference's outputs in its place. What a forced pass shows at a
site is therefore the work of one module alone: a leaf's own arithmetic, or what a container's code does between
its children. An error that came from elsewhere cannot be seen there. One forward tests every module that way.

It guarantees:
- a value that could not be forced (absent, of another shape) makes everything that its receiver does afterwards
  ``unproven``: nothing seen there is a proof;
- every value of the reference ends as measured, of another shape, absent, or not called.

Not here: which error is too large (`floor`), whose fault it is (`verdict`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap._torch import pytree, version_of
from torchtap.comparison.judge import Oddity, OddityKind
from torchtap.comparison.measures import Measures, measure
from torchtap.comparison.roles import RolePairs, alike, pair_by_role
from torchtap.errors import CompareError
from torchtap.hooks.leaves import Args, Kwargs, argument_name, input_leaves, leaves, map_inputs, map_leaves
from torchtap.hooks.visit import Call, Stop, Visiting, Visitor
from torchtap.plan.names import paths_around, read_name, site_name
from torchtap.plan.sites import places
from torchtap.progress import count

__all__ = [
    "Called",
    "Feed",
    "Trace",
    "TraceProbe",
    "TracedValue",
    "Versions",
    "calls_not_made",
    "default_dtype",
    "different_settings",
    "feed_of",
    "fresh",
    "golden_copy",
    "jitter",
    "record",
    "settings_of",
    "steady",
    "visiting",
]


def visiting(model: nn.Module, visitor: Visitor, only: Callable[[str], bool] | None = None) -> Visiting:
    """Every call of every module of a model for a visitor; all passes of the block are counted in one row."""
    stops = [
        Stop(place.path, place.module, key=place.module)
        for place in places(model)
        if only is None or only(place.path)
    ]
    return Visiting(model, visitor, stops, passes_apart=False)


@contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """Run passes of a model that leave no trace: buffers and the random state are put back at the end."""
    count("comparing: forward passes")
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                before = kept.get(name)
                if before is not None and before.shape == buffer.shape:
                    buffer.copy_(before)


@final
class Widened:
    """Casts a module's own floating-point parameters and buffers while the module runs, so that no copy is needed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: list[tuple[nn.Module, list[tuple[dict[str, Any], dict[str, Any]]]]] = []

    def enter(self, module: nn.Module) -> None:
        """Cast the tensors of a module that is about to run."""
        undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._held.append((module, undo))
        both: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
        for tensors in both:
            old = {name: x for name, x in tensors.items() if x is not None and x.is_floating_point()}
            undo.append((tensors, old))
            tensors.update({name: x.detach().to(self._dtype) for name, x in old.items()})

    def leave(self, module: nn.Module | None = None) -> None:
        """Put back the tensors of the last module that was entered; without one, of all."""
        while self._held:
            last, undo = self._held.pop()
            for tensors, old in undo:
                tensors.update(old)
            if last is module:
                return


def fresh(tree: object) -> Any:
    """A copy of inputs that a forward may change without the next pass noticing."""
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if isinstance(tree, (tuple, list, Mapping)) or type(tree) in pytree.SUPPORTED_NODES:
        return map_leaves(tree, lambda _, tensor: fresh(tensor))
    try:
        return copy.deepcopy(tree)
    except Exception:  # an object without a copy is handed over as it is, as a plain call would
        return tree


Feed = Callable[[Callable[..., Any]], Any]
_FAR_AT_PADDING = 1e-3  # relative; from here on a difference at padding is mentioned


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
    raw: Trace | None = None  # the trace as recorded, if values were merged or cut for a port
    # A merged or cut site and its sources in `raw`.
    derived: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # A module and the order that its output features have in the target.
    layouts: dict[str, Tensor] = field(default_factory=dict)
    # Modules that were paired by their outputs alone: a leaf with a container. Their inputs are not comparable.
    output_only: frozenset[str] = frozenset()

    @cached_property
    def shown(self) -> Tensor | None:
        """Return the positions that a mask among the model's inputs shows; None if there is no such mask."""
        for event in self.events:
            value = self.values[event.site]
            if event.module or event.kind != "input" or value.dim() != 2 or value.is_floating_point():
                continue
            shown = value != 0
            if bool(((value == 0) | (value == 1)).all()) and bool(shown.any()) and not bool(shown.all()):
                return shown
        return None

    def counted(self, value: Tensor) -> Tensor:
        """Return a value at the positions that count. Padding is computed differently by right kernels."""
        shown = self.shown
        if shown is None or value.dim() < 2:
            return value
        if value.shape[:2] == shown.shape:
            return value[shown.to(value.device)]
        if value.dim() == 4 and (value.shape[0], value.shape[2]) == shown.shape:  # heads before positions
            return value.movedim(2, 1)[shown.to(value.device)]
        return value

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

    def given(self) -> set[int]:
        """Return the identities of the call's tensors."""
        return {id(value) for _, value, _ in self._given}

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


def calls_not_made(trace: Trace, made: set[tuple[str, int]]) -> list[Oddity]:
    """Calls of the reference that the target never made; what is inside such a call is not listed again."""
    found: list[Oddity] = []
    gone: set[str] = set()
    for called in trace.calls:
        if (called.module, called.number) in made:
            continue
        if called.parent is not None and called.parent in gone:
            gone.add(called.module)
            continue
        gone.add(called.module)
        found.append(
            Oddity(
                _first_site(trace, called),
                called.at,
                called.parent,
                "not called",
                f"`{called.module}` is not called"
                + (f" a {called.number + 1}. time" if called.number else ""),
            )
        )
    return found


def _first_site(trace: Trace, called: Called) -> str:
    event = trace.events[called.at] if called.at < len(trace.events) else None
    return event.site if event is not None and _of(event, called) else site_name(called.module, "output")


def _of(event: TracedValue, called: Called) -> bool:
    return event.module == called.module


def different_settings(called: Called, settings: dict[str, object]) -> str:
    """How the plain arguments of a call differ from the reference's, in words; empty when they do not."""
    for name in called.settings.keys() & settings.keys():
        mine, theirs = called.settings[name], settings[name]
        if type(mine) is type(theirs) and mine != theirs and not (mine != mine and theirs != theirs):
            return f"`{called.module}` is called with {name}={theirs!r} instead of {mine!r}"
    return ""


@final
@dataclass(slots=True, eq=False)
class _Frame:
    """A call that is running."""

    call: Call
    path: str  # the reference's name for the module
    versions: Versions
    clean: bool = True  # whether its code had nothing but the reference's values so far
    complete: bool = True  # whether each of its inputs has a partner


class _Met(Enum):
    """How a value met the reference's at its site."""

    NOT = auto()  # it has another shape, or is a mask that says something else
    OTHERWISE_SPELT = auto()  # the same mask in another dtype
    ALIKE = auto()


@final
class TraceProbe:
    """Runs a model beside a reference's trace and measures, site by site, how far it is from it."""

    def __init__(
        self,
        trace: Trace,
        names: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
        brief: bool = True,
        widen: bool = False,
    ) -> None:
        self.differs_at_padding = ""  # the first site whose values differ at positions that do not count
        self._brief = brief
        self._widen = widen
        self._wide: Widened | None = None
        self._trace = trace
        self._names = names  # this model's module path -> the reference's; None: the same
        self._seed = seed
        self._expected: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
        self._place: dict[str, int] = {}
        for at, event in enumerate(trace.events):
            name = read_name(event.site)
            key = (event.module, event.kind, name.call)
            self._expected.setdefault(key, []).append((name.leaf, event.site))
            self._place[event.site] = at
        self._called = {(called.module, called.number): called for called in trace.calls}
        self._clear()

    def _clear(self) -> None:
        self.measures: dict[str, Measures] = {}
        self.oddities: list[Oddity] = []
        self.unproven: set[str] = set()  # sites whose author had other values than the reference's
        self.incomplete: set[str] = set()  # sites whose author had an input without a partner
        self.makers: dict[str, tuple[str | None, str | None]] = {}  # site -> author, and its name here
        self.results: dict[str, Tensor] = {}  # the model's own outputs
        self.dtypes: dict[str, torch.dtype] = {}
        self.replaced: dict[str, Tensor] = {}  # the model's own values where `healed` put others in place
        self._made: set[tuple[str, int]] = set()
        self._frames: list[_Frame] = []
        self._last = 0
        self._forced = False
        self._heal: frozenset[str] = frozenset()
        self._share = 0.0
        self._noise: torch.Generator | None = None
        self._noise_outputs = False
        self._cast: torch.dtype | None = None

    def free(
        self, model: nn.Module, feed: Feed, *, noise: int | None = None, cast: torch.dtype | None = None
    ) -> TraceProbe:
        """Let the model run on its own values; with ``noise`` each module's output is moved by about one ULP."""
        self._clear()
        self._noise_outputs = noise is not None
        self._cast = cast
        return self._run(model, feed, noise)

    def forced(
        self, model: nn.Module, feed: Feed, *, noise: int | None = None, cast: torch.dtype | None = None
    ) -> TraceProbe:
        """Hand each module the reference's inputs (with ``noise``, moved by about one ULP).

        ``cast`` is the dtype that the model computes in where that is not its inputs' (a float64 copy).
        """
        self._clear()
        self._forced = True
        self._cast = cast
        return self._run(model, feed, noise)

    def healed(self, model: nn.Module, feed: Feed, sites: Iterable[str], share: float = 0.0) -> TraceProbe:
        """Let the model run, but put the reference's values in place of its own at some sites.

        ``share`` of the difference stays: 0 heals, 1 changes nothing, more than 1 makes it worse.
        """
        self._clear()
        self._heal = frozenset(sites)
        self._share = share
        return self._run(model, feed, None)

    def _run(self, model: nn.Module, feed: Feed, noise: int | None) -> TraceProbe:
        if noise is not None:
            self._noise = torch.Generator().manual_seed(noise)
        self._wide = Widened(self._cast) if self._widen and self._cast is not None else None
        try:
            with steady(model), default_dtype(self._cast):
                torch.manual_seed(self._seed)
                with visiting(model, self):
                    feed(model)
        finally:
            if self._wide is not None:
                self._wide.leave()
        if self._names is None:
            self.oddities += calls_not_made(self._trace, self._made)
        return self

    # The visitor's side.

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if self._names is not None and call.path not in self._names:
            self._enter_unpaired(call, args, kwargs)
            return None
        path = call.path if self._names is None else self._names[call.path]
        given = list(input_leaves(call.input_names, args, kwargs, through_objects=False))
        frame = _Frame(call, path, Versions([]))
        if self._wide is not None:
            self._wide.enter(call.key)
        self._note_call(frame, settings_of(call.input_names, args, kwargs))
        instead, whole = self._look(frame, "input", given)
        frame.clean = whole
        frame.versions = Versions([(leaf, instead.get(leaf, value)) for leaf, value in given])
        self._frames.append(frame)
        if not instead:
            return None
        return map_inputs(call.input_names, args, kwargs, lambda leaf, t: instead.get(leaf, t))

    def after(self, call: Call, output: object) -> Any:
        while self._frames and self._frames[-1].call.path != call.path:
            self._frames.pop()  # a call that an exception ended
        if not self._frames:
            return None
        frame = self._frames[-1]
        if self._wide is not None:
            self._wide.leave(call.key)
        if self._names is not None and call.path not in self._names:
            self._frames.pop()
            if self._frames and not frame.clean:
                self._frames[-1].clean = False
            return None
        self._note_changes(frame)
        instead, whole = self._look(frame, "output", list(leaves(output, through_objects=False)))
        self._frames.pop()
        if self._frames and not whole:
            self._frames[-1].clean = False
        if not instead:
            return None
        return map_leaves(output, lambda leaf, t: instead.get(leaf, t))

    def _enter_unpaired(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Note a call of a module that has no partner: its code counts as that of the module around it."""
        outer = next(reversed(self._frames), None)
        given = list(input_leaves(call.input_names, args, kwargs, through_objects=False))
        frame = _Frame(call, "" if outer is None else outer.path, Versions(given))
        if outer is not None:
            frame.clean, frame.complete = outer.clean, outer.complete
        self._frames.append(frame)

    def _note_call(self, frame: _Frame, settings: dict[str, object]) -> None:
        """Whether the reference made this call, and with the same plain arguments."""
        key = (frame.path, frame.call.number)
        self._made.add(key)
        if self._names is not None:
            return
        called = self._called.get(key)
        if called is None:
            why = f"`{frame.path}` is called {frame.call.number + 1} times, in the reference {frame.call.number}"
            self._odd(site_name(frame.path, "output"), self._last, frame.call.parent, "extra", why)
            return
        why = different_settings(called, settings)
        if why:
            self._odd(site_name(frame.path, "input"), called.at, frame.call.parent, "argument", why)

    def _note_changes(self, frame: _Frame) -> None:
        called = self._called.get((frame.path, frame.call.number))
        if called is None or self._names is not None:
            return
        changed = [leaf for leaf in frame.versions.changed() if leaf not in called.changes]
        if changed:
            site = site_name(frame.path, "input", changed[0])
            why = f"`{frame.path}` changes what it was given in place, the reference does not"
            self._odd(site, self._last, frame.path, "in place", why)

    def _odd(self, site: str, at: int, author: str | None, kind: OddityKind, why: str) -> None:
        self.oddities.append(Oddity(site, at, author, kind, why))

    def _look(
        self, frame: _Frame, kind: str, found: list[tuple[str, Tensor]]
    ) -> tuple[dict[str, Tensor], bool]:
        """Return what to put in place of the values, and whether each of them met its counterpart."""
        if self._names is None and (frame.path, frame.call.number) not in self._called:
            return {}, False  # a call that the reference did not make is reported once, by `_note_call`
        expected = self._expected.get((frame.path, kind, frame.call.number), [])
        if self._names is None:
            pairs = RolePairs(_match(found, expected, self._trace.values))
        else:
            pairs = pair_by_role(found, expected, self._trace.values)
            frame.complete = frame.complete and not (kind == "input" and pairs.unpaired)
            self._note_results(frame, kind, found, expected, pairs)
        if kind == "input" and frame.path in self._trace.output_only:
            return {}, True
        maker = frame if kind == "output" else self._caller(found)
        author = self._author(frame, kind)
        whole = self._note_unmatched(frame.path, kind, author, found, expected, pairs.sites)
        for site, both in pairs.derived.items():
            self._note_maker(site, author, frame, kind, maker)
            self.measures[site] = measure(*map(self._trace.counted, both), brief=self._brief)
            whole = whole and self.measures[site].identical
        instead: dict[str, Tensor] = {}
        for leaf, value in found:
            paired = pairs.sites.get(leaf)
            if paired is None or paired in pairs.derived:
                continue
            site = paired
            reference = self._trace.values[site]
            order = self._trace.layouts.get(frame.path) if self._names is not None else None
            if order is not None and kind == "output" and reference.shape[-1] == len(order):
                reference = reference.index_select(-1, order.to(reference.device))
            met = self._meet(site, reference, value, author)
            self._note_maker(site, author, frame, kind, maker)
            if frame.path == "" and kind == "output":
                self.results[site] = value.detach().clone()
            whole = whole and met is not _Met.NOT
            put = self._instead(site, kind, reference, value) if met is _Met.ALIKE else None
            if put is not None:
                instead[leaf] = put
        return instead, whole

    def _note_results(
        self,
        frame: _Frame,
        kind: str,
        found: list[tuple[str, Tensor]],
        expected: list[tuple[str, str]],
        pairs: RolePairs,
    ) -> None:
        """Report results of a port that have no partner: another shape is another function."""
        if frame.path == "" and kind == "output" and found and expected and not pairs.sites:
            site = expected[0][1]
            shapes = _shape(found[0][1]), _shape(self._trace.values[site])
            why = f"its shape is {shapes[0]}, in the reference {shapes[1]}"
            self._odd(site, self._place[site], "", "shape", why)

    def _note_maker(
        self, site: str, author: str | None, frame: _Frame, kind: str, maker: _Frame | None
    ) -> None:
        """Note which module made a value, and whether that module had only the reference's values."""
        self._last = max(self._last, self._place[site] + 1)
        if kind == "output" or self._names is None:
            self.makers[site] = (author, frame.call.path if kind == "output" else frame.call.parent)
        else:
            self.makers[site] = (author, None if maker is None else maker.call.path)
        if (maker is not None and not maker.clean) or frame.path in self._trace.output_only:
            self.unproven.add(site)
        if maker is not None and not maker.complete:
            self.incomplete.add(site)

    def _caller(self, found: list[tuple[str, Tensor]]) -> _Frame | None:
        """Return the call whose code made the inputs of a call: one that only passes its own input on did not."""
        values = {id(value) for _, value in found}
        frames = list(reversed(self._frames))
        if self._names is not None:
            for frame in frames:
                if not values & frame.versions.given():
                    return frame
        return next(iter(frames), None)

    def _author(self, frame: _Frame, kind: str) -> str | None:
        """Return the module that made a value, by the reference's name of it or of the nearest module around it."""
        if kind == "output":
            return frame.path
        author = frame.call.parent
        if author is None or self._names is None:
            return author
        return next(
            (self._names[each] for each in (author, *paths_around(author)) if each in self._names), ""
        )

    def _meet(self, site: str, reference: Tensor, value: Tensor, author: str | None) -> _Met:
        """Measure a value against the reference's at its site."""
        same_layout = reference.shape == value.shape if self._names is None else alike(reference, value)
        if not same_layout:
            why = f"its shape is {_shape(value)}, in the reference {_shape(reference)}"
            self._odd(site, self._place[site], author, "shape", why)
            return _Met.NOT
        self.dtypes[site] = value.dtype
        both = reference, value.detach().reshape(reference.shape)
        counted = self._trace.counted(both[0]), self._trace.counted(both[1])
        self.measures[site] = measure(*counted, brief=self._brief)
        if not self.differs_at_padding and counted[0] is not reference and reference.is_floating_point():
            apart = measure(*both, brief=True).rel_l2
            if apart > _FAR_AT_PADDING > self.measures[site].rel_l2:
                self.differs_at_padding = site
        if (reference.dtype == torch.bool) != (value.dtype == torch.bool):
            # A mask in another spelling cannot be handed over; the model's own says the same, or proves nothing.
            return _Met.OTHERWISE_SPELT if self.measures[site].identical else _Met.NOT
        return _Met.ALIKE

    def _note_unmatched(
        self,
        path: str,
        kind: str,
        author: str | None,
        found: list[tuple[str, Tensor]],
        expected: list[tuple[str, str]],
        sites: dict[str, str],
    ) -> bool:
        """Note values that only one side has. Ports of other classes may well take other arguments."""
        if self._names is not None or self._trace.partial:
            return True
        whole = True
        taken = set(sites.values())
        for leaf, site in expected:
            if site not in taken:
                whole = False
                what = f"the {kind} {leaf}" if leaf else f"the {kind}"
                self._odd(
                    site, self._place[site], author, "absent", f"{what} of `{path}` is no tensor, or absent"
                )
        for leaf, _ in found:
            if leaf not in sites:
                whole = False
                site = site_name(path, kind, leaf)
                self._odd(site, self._last, author, "extra", "the reference has no tensor here")
        return whole

    def _instead(self, site: str, kind: str, reference: Tensor, value: Tensor) -> Tensor | None:
        """The value to go on with in place of the model's own; ``None`` to leave it."""
        healed = site in self._heal
        if healed:
            self.replaced[site] = value.detach().clone()
        if self._forced or healed:
            put = self._jittered(self._of_reference(reference, value), kind == "input")
            # The trace is not the model's to change in place.
            return put.clone() if put.data_ptr() == reference.data_ptr() else put
        if self._noise_outputs and kind == "output":
            return self._jittered(value)
        cast = self._cast_of(value.dtype)
        return None if cast == value.dtype else value.to(cast)

    def _jittered(self, value: Tensor, wanted: bool = True) -> Tensor:
        return jitter(value, self._noise) if wanted and self._noise is not None else value

    def _of_reference(self, reference: Tensor, value: Tensor) -> Tensor:
        """The reference's value as the model would have it, with the share of the difference that is to stay."""
        put = reference.to(value.device, self._cast_of(value.dtype)).reshape(value.shape)
        if not (self._share and value.is_floating_point()):
            return put
        # What is not finite cannot be moved by a share; there the model's own value stays.
        moved = put.double() + self._share * (value.double() - put.double())
        return torch.where(torch.isfinite(moved), moved, value.double()).to(value.dtype)

    def _cast_of(self, dtype: torch.dtype) -> torch.dtype:
        return self._cast if self._cast is not None and dtype.is_floating_point else dtype


def _match(
    found: list[tuple[str, Tensor]], expected: list[tuple[str, str]], values: Mapping[str, Tensor]
) -> dict[str, str]:
    """Pair the values of a call of two models with equal names: by name, then in order by shape."""
    by_leaf = dict(expected)
    sites = {leaf: by_leaf[leaf] for leaf, _ in found if leaf in by_leaf}
    left = [(leaf, value) for leaf, value in found if leaf not in sites]
    taken = set(sites.values())
    right = [site for _, site in expected if site not in taken]
    if len(left) == len(right):
        return sites | {leaf: site for (leaf, _), site in zip(left, right, strict=True)}
    for leaf, value in left:
        same = next((site for site in right if values[site].shape == value.shape), None)
        if same is not None:
            sites[leaf] = same
            right.remove(same)
    return sites


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))
