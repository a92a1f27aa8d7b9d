"""Run a model beside a reference's recorded pass, freely or with the reference's values forced in.

A *free* pass lets a model run on its own values. A *forced* pass hands every module the reference's own inputs
and, after looking at what it returned, puts the reference's outputs in its place. What a forced pass shows at a
site is therefore the work of one module alone: a leaf's own arithmetic, or what a container's code does between
its children. An error that came from elsewhere cannot be seen there. One forward tests every module that way.

It guarantees:
- a value that could not be forced (absent, of another shape) makes everything that its receiver does afterwards
  ``unproven``: nothing seen there is a proof;
- every value of the reference ends as measured, of another shape, absent, or not called.

Not here: recording the reference (`tracing`), which error is too large (`floor`), whose fault it is (`verdict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.comparison.live.hooked import steady, visiting
from torchtap.comparison.live.oddities import Oddity, OddityKind, calls_not_made, different_settings
from torchtap.comparison.live.tracing import Feed, Trace, Versions, default_dtype, jitter, settings_of
from torchtap.comparison.measure.measures import Measures, measure
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.hooks.structure import map_inputs, map_leaves
from torchtap.hooks.visit import Call
from torchtap.plan.names import read_name, site_name

__all__ = ["TraceProbe"]


@final
@dataclass(slots=True, eq=False)
class _Frame:
    """A call that is running."""

    call: Call
    path: str  # the reference's name for the module
    versions: Versions
    clean: bool = True  # whether its code had nothing but the reference's values so far


class _Met(Enum):
    """How a value met the reference's at its site."""

    NOT = auto()  # it has another shape, or is a mask that says something else
    OTHERWISE_SPELT = auto()  # the same mask in another dtype
    ALIKE = auto()


@final
class TraceProbe:
    """Runs a model beside a reference's trace and measures, site by site, how far it is from it."""

    def __init__(
        self, trace: Trace, names: Mapping[str, str] | None = None, *, seed: int = 0, brief: bool = True
    ) -> None:
        self._brief = brief
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
        with steady(model), default_dtype(self._cast):
            torch.manual_seed(self._seed)
            with visiting(model, self, None if self._names is None else self._names.__contains__):
                feed(model)
        if self._names is None:
            self.oddities += calls_not_made(self._trace, self._made)
        return self

    # The visitor's side.

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        path = call.path if self._names is None else self._names[call.path]
        given = list(input_leaves(call.input_names, args, kwargs, through_objects=False))
        frame = _Frame(call, path, Versions([]))
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
        self._note_changes(frame)
        instead, whole = self._look(frame, "output", list(leaves(output, through_objects=False)))
        self._frames.pop()
        if self._frames and not whole:
            self._frames[-1].clean = False
        if not instead:
            return None
        return map_leaves(output, lambda leaf, t: instead.get(leaf, t))

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
        """What to put in place of the values, and whether each of them met its counterpart."""
        if self._names is None and (frame.path, frame.call.number) not in self._called:
            return {}, False  # a call that the reference did not make is told once, by `_note_call`
        expected = self._expected.get((frame.path, kind, frame.call.number), [])
        sites = _match(found, expected, self._trace.values, self._names is None)
        maker = frame if kind == "output" else next(reversed(self._frames), None)
        author = self._author(frame, kind)
        whole = self._note_unmatched(frame.path, kind, author, found, expected, sites)
        instead: dict[str, Tensor] = {}
        for leaf, value in found:
            site = sites.get(leaf)
            if site is None:
                continue
            reference = self._trace.values[site]
            met = self._meet(site, reference, value, author, maker is None or maker.clean)
            whole = whole and met is not _Met.NOT
            put = self._instead(site, kind, reference, value) if met is _Met.ALIKE else None
            if put is not None:
                instead[leaf] = put
        return instead, whole

    def _author(self, frame: _Frame, kind: str) -> str | None:
        """The module that made a value, by the reference's name where it has one."""
        if kind == "output":
            return frame.path
        author = frame.call.parent
        return author if author is None or self._names is None else self._names.get(author, author)

    def _meet(self, site: str, reference: Tensor, value: Tensor, author: str | None, clean: bool) -> _Met:
        """Measure a value against the reference's at its site. ``clean``: its maker had the reference's values."""
        self._last = max(self._last, self._place[site] + 1)
        if not _alike(reference, value, self._names is None):
            why = f"its shape is {_shape(value)}, in the reference {_shape(reference)}"
            self._odd(site, self._place[site], author, "shape", why)
            return _Met.NOT
        if not clean:
            self.unproven.add(site)
        self.dtypes[site] = value.dtype
        self.measures[site] = measure(reference, value.detach().reshape(reference.shape), brief=self._brief)
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
    found: list[tuple[str, Tensor]],
    expected: list[tuple[str, str]],
    values: Mapping[str, Tensor],
    strict: bool,
) -> dict[str, str]:
    """Which value is which of the reference's: by name, then in order by shape, then in order."""
    by_leaf = dict(expected)
    sites = {leaf: by_leaf[leaf] for leaf, _ in found if leaf in by_leaf}
    if len(sites) == len(found) == len(expected):
        return sites
    left = [(leaf, value) for leaf, value in found if leaf not in sites]
    taken = set(sites.values())
    right = [site for _, site in expected if site not in taken]
    if len(left) == len(right):
        # Another class may name its arguments differently; their order still says which is which.
        return sites | {leaf: site for (leaf, _), site in zip(left, right, strict=True)}
    for leaf, value in left:
        same = next((site for site in right if _alike(values[site], value, strict)), None)
        if same is not None:
            sites[leaf] = same
            right.remove(same)
    return sites


def _alike(reference: Tensor, value: Tensor, strict: bool) -> bool:
    """Whether two values have the same shape; of models with other names also apart from axes of one element."""
    if strict or reference.shape == value.shape:
        return reference.shape == value.shape
    return [n for n in reference.shape if n != 1] == [n for n in value.shape if n != 1]


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))
