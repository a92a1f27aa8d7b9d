"""The trail of values that are not finite numbers, operator by operator, through a forward and its backward.

A dispatch mode looks at what every operator returns. An operator that returns a NaN or an infinity leaves an event:
what it was called, in whose code it ran, and which earlier events its arguments came from. From a bad result the trail
leads back to where it began. It guarantees:
- an infinity that is put in on purpose (a mask that is filled with ``-inf``) is no beginning, unless a NaN comes of it;
- memory that nobody has written yet (``torch.empty``) is not looked at;
- nothing is changed: operators run on the values that they would run on without it.

Each operator is waited for: this is for one step that is looked into, not for a training.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from torchtap._torch import DispatchMode, in_backward, node_that_runs, pytree, sequence_number

__all__ = ["Event", "OpTrail", "Range", "range_of"]

Direction = Literal["forward", "backward"]
BadKind = Literal["nan", "inf"]

_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize_")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@final
@dataclass(frozen=True, slots=True)
class Range:
    """What one argument of an operator looked like: the smallest and the largest of its finite values."""

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    nans: int
    infs: int

    def __str__(self) -> str:
        bad = f", {self.nans} NaN" * bool(self.nans) + f", {self.infs} inf" * bool(self.infs)
        size = "×".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {size} in [{self.low:.4g}, {self.high:.4g}]{bad}"


@final
@dataclass(slots=True, eq=False)
class Event:
    """A tensor with values that are not finite, and the operator that returned it; none for what was given."""

    kind: BadKind
    direction: Direction
    op: str
    path: str  # of the module in whose code it ran
    given: str = ""  # the site of an input, a parameter or a buffer that was bad before any operator
    node: str = ""  # of autograd, in a backward
    line: str = ""  # of the user's code, in a forward
    index: tuple[int, ...] = ()  # of the first bad element
    count: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    inputs: tuple[Range, ...] = ()
    parents: list[Event] = field(default_factory=list)
    on_purpose: bool = False

    def births(self) -> Iterator[Event]:
        """Where the trail to this event begins: events that no earlier one explains."""
        seen: set[int] = set()
        waiting = [self]
        while waiting:
            event = waiting.pop()
            if id(event) in seen:
                continue
            seen.add(id(event))
            causes = [each for each in event.parents if not each.on_purpose]
            if event.kind == "nan":
                # A NaN comes of a NaN if there is one, else of an infinity.
                causes = [each for each in causes if each.kind == "nan"] or causes
            if causes:
                waiting.extend(causes)
            else:
                yield event


@final
class OpTrail(DispatchMode):
    """Enter it around a forward and its backward, and say with `entered` and `left` whose code runs."""

    def __init__(self, given: dict[int, str], on_birth: Callable[[Event], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given  # where memory begins -> the site whose value lies there
        self._on_birth = on_birth
        self._inside: list[str] = []
        self._owners: dict[
            int, tuple[str, str]
        ] = {}  # number of an autograd node -> path, line of its forward
        self._bad: dict[int, Event] = {}  # where memory begins -> what made it bad
        self.events: list[Event] = []

    def entered(self, path: str) -> None:
        """A module's forward begins."""
        self._inside.append(path)

    def left(self, path: str) -> None:
        """It is over, or one around it is."""
        while self._inside and self._inside.pop() != path:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An in-place operator replaces what it was given, so the arguments are looked at first.
        given = _tensors((args, kwargs))
        parents = [self._event_of(each) for each in given if _is_bad(each) and not self._is_constant(each)]
        known = {_place(each) for each in given}
        result = func(*args, **kwargs)
        name = str(func)
        self._note_owner()
        for value in _tensors(result):
            place = _place(value)
            if name.startswith(_UNWRITTEN) or not _is_bad(value):
                if place not in known:  # a view of bad memory may be finite; fresh memory is nobody's
                    self._bad.pop(place, None)
            else:
                event = self._bad[place] = self._event(name, value, args, kwargs, parents)
                self.events.append(event)
                self._tell(event)
        return result

    def event_at(self, value: Tensor) -> Event | None:
        """What made this value bad; None for one that is finite."""
        return self._event_of(value) if _is_bad(value) else None

    def _tell(self, event: Event) -> None:
        if self._on_birth is not None and not event.on_purpose and not event.parents:
            self._on_birth(event)

    def _is_constant(self, value: Tensor) -> bool:
        """A number that the code itself has written down, rather than computed."""
        return value.ndim == 0 and _place(value) not in self._bad and _place(value) not in self._given

    def _event_of(self, value: Tensor) -> Event:
        place = _place(value)
        known = self._bad.get(place)
        if known is None:
            site = self._given.get(place, "")
            known = self._bad[place] = _described(
                Event(_kind(value), "forward", "", "", given=site or "outside of the model"), value
            )
            # A mask that is handed in, or kept by the model, has infinities on purpose.
            known.on_purpose = known.kind == "inf" and ":param" not in site
        return known

    def _event(self, name: str, value: Tensor, args: object, kwargs: object, parents: list[Event]) -> Event:
        direction, path, node, line = self._where()
        event = Event(_kind(value), direction, name, path, node=node, line=line, parents=parents)
        event.on_purpose = event.kind == "inf" and (
            all(each.on_purpose for each in parents) if parents else _has_infinite_number((args, kwargs))
        )
        if next(event.births()) is event:
            _described(event, value)
            event.inputs = tuple(range_of(each) for each in _tensors((args, kwargs)) if _is_real(each))
        return event

    def _where(self) -> tuple[Direction, str, str, str]:
        """Whose code runs now. In a backward that is the code whose forward made autograd's node."""
        if self._inside or not in_backward():
            return "forward", self._inside[-1] if self._inside else "", "", _line()
        running = node_that_runs()
        if running is None:
            return "backward", "", "", ""
        name, number = running
        path, line = self._owners.get(number, ("", ""))
        return "backward", path, name, line

    def _note_owner(self) -> None:
        if self._inside or not in_backward():
            number = sequence_number() - 1
            if number not in self._owners:
                self._owners[number] = (self._inside[-1] if self._inside else "", _line())


def range_of(value: Tensor) -> Range:
    """The range of a tensor's finite values, and how many are not finite."""
    plain = value.detach()
    plain = plain.abs() if plain.is_complex() else plain
    finite = plain[plain.isfinite()].double() if plain.numel() else plain.double()
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan, math.nan)
    dtype = str(value.dtype).removeprefix("torch.")
    return Range(dtype, tuple(value.shape), low, high, int(plain.isnan().sum()), int(plain.isinf().sum()))


def _described(event: Event, value: Tensor) -> Event:
    """With the first bad element and the number of them."""
    bad = value.detach().isnan() if event.kind == "nan" else value.detach().isinf()
    first = bad.nonzero()[0].tolist() if bad.ndim else []
    event.index, event.count = tuple(first), int(bad.sum())
    event.dtype, event.shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    return event


def _tensors(tree: object) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def _is_real(value: Tensor) -> bool:
    """Whether a tensor holds floating numbers that can be looked at."""
    holds = value.is_floating_point() or value.is_complex()
    return holds and value.layout == torch.strided and value.device.type != "meta" and value.numel() > 0


def _is_bad(value: Tensor) -> bool:
    return _is_real(value) and not bool(value.isfinite().all())


def _kind(value: Tensor) -> BadKind:
    return "nan" if bool(value.isnan().any()) else "inf"


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else id(value)


def _has_infinite_number(tree: object) -> bool:
    return any(isinstance(each, float) and math.isinf(each) for each in pytree.tree_leaves(tree))


def _line() -> str:
    """The innermost line that is neither torch's nor ours: the user's."""
    frame = sys._getframe()
    for each in _frames(frame):
        file = each.f_code.co_filename
        if not file.startswith((_TORCH, _OURS, "<")):
            return f"{file}:{each.f_lineno} ({each.f_code.co_name})"
    return ""


def _frames(frame: Any) -> Iterable[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back
