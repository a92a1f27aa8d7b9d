"""Where a NaN or an infinity was born: the module, the operator in it, the first element, forward or backward.

`find_nan` runs a model once, forwards and backwards, and leaves it as it was. The flight recorder uses the same search
for a step that it kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import final

import torch
from torch import Tensor, nn

from torchtap.diagnosis.op_trail import Event, OpTrail, Range
from torchtap.errors import FormError
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.hooks.visit import Call, Stop, Visiting
from torchtap.plan.names import join_path, site_name
from torchtap.plan.sites import input_names, places, unwrap
from torchtap.session.untouched import untouched

__all__ = ["Birth", "Search", "find_nan"]

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
        self,
        models: Mapping[str, nn.Module],
        on_birth: Callable[[Event], None] | None = None,
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
