"""Where a NaN or an infinity was born: the module, the operator in it, the first element, forward or backward.

`find_nan` runs a model once, forwards and backwards, and leaves it as it was. The flight recorder uses the same search
for a step that it kept. A dispatch mode looks at what every operator returns. An operator that returns a NaN or an
infinity leaves an event with its name, its module, and the earlier events that its arguments stem from. It guarantees:
- an infinity that is put in on purpose (a mask filled with ``-inf``) is no origin, unless a NaN results from it;
- memory that is not written yet (``torch.empty``) is not looked at;
- nothing is changed: operators run on the values that they would run on without it.

Each operator is waited for: this is for one step under examination, not for a training.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from torchtap._torch import DispatchMode, in_backward, node_that_runs, pytree, sequence_number
from torchtap.errors import FormError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.names import join_path, site_name
from torchtap.spi import Call, Stop, Visiting, input_leaves, input_names, leaves, places, untouched, unwrap

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
    """Return True if a tensor holds floating numbers that can be looked at."""
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


# Operators that give an infinity at zero.
_POLES = tuple(f"aten.{name}" for name in ("div", "log", "reciprocal", "rsqrt", "true_divide"))
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}


@final
@dataclass(frozen=True, slots=True)
class Birth:
    """The first value that was not a finite number and led to the others."""

    kind: str  # "nan" or "inf"
    direction: str  # "forward" or "backward"
    site: str  # where it shows first
    module: str  # the path of the module in whose code the operator ran; empty for the model itself
    op: str  # torch's name of the operator; empty if the value came in bad
    index: tuple[int, ...]  # of the first bad element in what the operator returned
    count: int  # bad elements in it
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[Range, ...]  # of the operator
    line: str  # of the user's code that called it; in a backward, of the forward that it belongs to
    node: str  # of autograd, in a backward
    step: int | None = None

    @property
    def overflow(self) -> bool:
        """Whether finite numbers gave one that the dtype cannot hold; a pole, such as a division by zero, is none."""
        if self.kind != "inf" or not self.op or any(each.nans or each.infs for each in self.inputs):
            return False
        return not (self.op.startswith(_POLES) and any(each.low <= 0 <= each.high for each in self.inputs))

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        return {**asdict(self), "overflow": self.overflow}

    def __str__(self) -> str:
        word = "NaN" if self.kind == "nan" else "inf"
        step = f", step {self.step}" if self.step is not None else ""
        first = f"the first at {list(self.index)}"
        if not self.op:
            after = " (born after the model, in the loss)" if ":grad_output" in self.site else ""
            return f"{word} came in with {self.site}{after}{step}: {self.count} of them, {first}"
        where = f"in the {self.direction} of {self.module or 'the model itself'}"
        node = f" ({self.node})" if self.node else ""
        shape = "×".join(map(str, self.shape)) or "1"
        return (
            f"{word} born {where}, by {self.op}{node}{step}: {self.count} of {shape}, {first}{self._around()}"
        )

    def _around(self) -> str:
        """What led to it: the dtype's limit, the operator's arguments, the line."""
        told = []
        if self.overflow and self.dtype in _LARGEST:
            told.append(f"; {self.dtype} holds at most {_LARGEST[self.dtype]:.4g}")
        if self.inputs:
            told.append("; its arguments: " + "; ".join(map(str, self.inputs)))
        if self.line:
            told.append(f"; {self.line}")
        return "".join(told)


@final
class Search:
    """Runs something under an `OpTrail` with the modules' calls told to it, and says where the trail begins."""

    def __init__(
        self, models: Mapping[str, nn.Module], on_birth: Callable[[Event], None] | None = None
    ) -> None:
        self._models = {name: unwrap(model) for name, model in models.items()}
        self._given: dict[int, str] = {}
        for name, model in self._models.items():
            for place in places(model):
                path = join_path(name, place.path)
                for kind, held in (("param", place.module._parameters), ("buffer", place.module._buffers)):
                    for leaf, tensor in held.items():
                        if tensor is not None and tensor.layout == torch.strided:
                            self._given[tensor.untyped_storage().data_ptr()] = site_name(path, kind, leaf)
        self._trail = OpTrail(self._given, on_birth)
        self._bad: Event | None = None

    def name_inputs(self, model: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """These tensors are what a model is called with."""
        names = input_names(self._models[model])
        for leaf, tensor in input_leaves(names, args, kwargs):
            if tensor.layout == torch.strided:
                self._given[tensor.untyped_storage().data_ptr()] = site_name(model, "input", leaf)

    def name_seeds(self, model: str, seeds: Mapping[int, Mapping[str, Tensor]]) -> None:
        """These tensors are what backward passes hand to a model's outputs."""
        for handed in seeds.values():
            for leaf, tensor in handed.items():
                self._given[tensor.untyped_storage().data_ptr()] = site_name(model, "grad_output", leaf)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """The block in which operators are looked at."""
        visiting = [
            Visiting(model, _Calls(self._trail, name), _stops(model)) for name, model in self._models.items()
        ]
        try:
            for each in visiting:
                each.begin()
            with self._trail:
                yield
        finally:
            for each in visiting:
                each.end()

    def look_at(self, results: Iterable[Tensor]) -> None:
        """Of these results, the first bad one is what is searched for."""
        for value in results:
            if self._bad is None:
                self._bad = self._trail.event_at(value)

    def birth(self, step: int | None = None) -> Birth | None:
        """Where the trail of the first bad result begins; of all bad values, if every result was finite."""
        if self._bad is not None:
            order = {id(event): number for number, event in enumerate(self._trail.events)}
            event = min(self._bad.births(), key=lambda each: order.get(id(each), -1))
        else:
            unwanted = (each for each in self._trail.events if not each.on_purpose)
            found = next(unwanted, None)
            if found is None:
                return None
            event = next(found.births())
        return _born(event, step)


def find_nan(
    model: nn.Module,
    *args: object,
    loss: Callable[[object], Tensor] | None = None,
    backward: bool = True,
    **kwargs: object,
) -> Birth | None:
    """Run a model once on these inputs and say where its first NaN or infinity is born; None if all is finite.

    ``loss`` makes the number to differentiate of what the model returns; without it the model's own scalar is taken,
    or the sum of its outputs. ``backward=False`` looks at the forward only. An infinity that is filled in on purpose,
    such as a mask, is not reported. The model is left as it was: gradients, buffers, modes and random numbers. A
    compiled model is run as the eager one inside.
    """
    if not isinstance(model, nn.Module):
        raise FormError(
            f"find_nan({type(model).__name__}): give an nn.Module; other forms do not tell their operators"
        )
    inner = unwrap(model)
    search = Search({"": inner})
    search.name_inputs("", args, kwargs)
    with untouched(inner):
        with search.looking(), torch.enable_grad() if backward else torch.no_grad():
            output = inner(*args, **kwargs)
            target = loss(output) if loss is not None else None
        search.look_at(tensor for _, tensor in leaves(output))
        if target is not None:
            search.look_at([target])
        if backward:
            _differentiate(search, inner, output, target)
    return search.birth()


def _differentiate(search: Search, model: nn.Module, output: object, target: Tensor | None) -> None:
    wanted = [each for each in model.parameters() if each.requires_grad]
    targets = _results(output) if target is None else [target] if target.requires_grad else []
    if not targets or not wanted:
        return
    with search.looking():
        seeds = [torch.ones_like(each) for each in targets]
        gradients = torch.autograd.grad(targets, wanted, seeds, allow_unused=True)
    search.look_at(each for each in gradients if each is not None)


def _results(output: object) -> list[Tensor]:
    """What to differentiate of an output: its first number (a loss), or all of it."""
    found = [tensor for _, tensor in leaves(output) if tensor.requires_grad]
    return [tensor for tensor in found if tensor.ndim == 0][:1] or found


class _Calls:
    """Tells a trail which module's code runs."""

    def __init__(self, trail: OpTrail, model: str) -> None:
        self._trail, self._model = trail, model

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        self._trail.entered(join_path(self._model, call.path))

    def after(self, call: Call, output: object) -> None:
        self._trail.left(join_path(self._model, call.path))


def _stops(model: nn.Module) -> list[Stop]:
    return [Stop(place.path, place.module) for place in places(model)]


def _born(event: Event, step: int | None) -> Birth:
    if event.given:
        site = event.given
    else:
        site = site_name(event.path, "output" if event.direction == "forward" else "grad_input", "")
    return Birth(
        event.kind, event.direction, site, event.path, event.op, event.index, event.count, event.dtype, event.shape,
        event.inputs, event.line, event.node, step,
    )  # fmt: skip
