"""Run a model once, or train it for a few steps, and sketch every value on the way.

Values are listed in the order of execution: inputs and outputs of each module's calls, then gradients in the order of
the backward pass, then the loss, parameter gradients and updates of each step. A run may add noise: each module's
output is moved by one unit in the last place. A model that is run forward is left unchanged.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtap.comparison.passes import default_dtype, feed_of, jitter, visiting
from torchtap.comparison.values import value_of_tensor
from torchtap.errors import CompareError
from torchtap.golden.sketch import Sketch, sketch
from torchtap.spi import Call, Name, SharedFolder, input_leaves, leaves, map_leaves, places, untouched

__all__ = ["Observation", "in_order_of", "observe"]

_ROWS = 512  # a larger batch is not looked through for its order
State = dict[str, Sketch]  # of each parameter and persistent buffer


@final
@dataclass(slots=True)
class Observation:
    """Everything that one run showed. A golden is one that was named and kept."""

    modules: dict[str, str]  # class, settings, checksum of the source; also of the library and of optimizers
    batch: list[int] = field(default_factory=list)  # a checksum of each row of the inputs
    state: State = field(default_factory=dict)  # the weights, before a training
    sites: dict[str, Sketch] = field(default_factory=dict)
    results: list[Sketch] = field(default_factory=list)  # of a compiled model, whose sites were seen eagerly
    name: str = ""
    steps: int = 0  # of a training; 0 for a forward pass
    floors: dict[str, float] = field(default_factory=dict)  # of the machine that recorded it
    target: str = ""  # ``file.py:function``, for the command line; empty: checked by pytest
    made: dict[str, Any] = field(default_factory=dict)  # versions and processor

    model = property(lambda self: self.modules[""].partition("(")[0])  # its class


@final
class _Observer:
    """Sketch what a model computes. With ``seed``, move each module's output by one unit in the last place."""

    def __init__(self, model: nn.Module, seed: int | None, known: State | None, *, training: bool) -> None:
        self._model, self._training, self._step = model, training, 0
        self._random = None if seed is None else torch.Generator().manual_seed(seed)
        self.seen = Observation({place.path: _described(place.module) for place in places(model)})
        self.seen.modules["(library)"] = _text("torch", {
            "training": model.training, "default_dtype": torch.get_default_dtype(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
        })  # fmt: skip
        if known is not None:
            self.seen.state = {name: _weight(value, known.get(name)) for name, value in _tensors(model)}

    def run(self, step: Callable[[int], Any], steps: int) -> Observation:
        """Run ``step``. Of later steps of a training only loss, gradients and updates are looked at."""
        before = dict(self.seen.state)
        handle = register_optimizer_step_pre_hook(self._gradients)
        try:
            with visiting(self._model, self):
                for self._step in range(steps):
                    _seed(self._step)
                    result = step(self._step)
                    if self._training:
                        self._put(":value.loss", torch.as_tensor(result))
                        self._updates(before)
        finally:
            handle.remove()
        if not any(name.startswith((":output", ":value")) for name in self.seen.sites):
            for leaf, value in leaves(result):  # another method of the module was called
                self._put(str(Name("", "output", leaf)), value)
        self._step = 0
        for name, value in _tensors(self._model):
            if ":buffer" in name and (self._training or self._model.training):
                self._put(name, value)
        return self.seen

    def before(self, call: Call, args: Any, kwargs: Any) -> Any:
        self._pass(call, "input", input_leaves(call.input_names, args, kwargs, through_objects=False))
        if self._random is None or call.parent is not None:
            return None
        return map_leaves(args, self._moved), map_leaves(kwargs, self._moved)

    def after(self, call: Call, output: object) -> Any:
        changed = output if self._random is None else map_leaves(output, self._moved)
        self._pass(call, "output", leaves(changed, through_objects=False))
        return None if self._random is None else changed

    def _pass(self, call: Call, kind: str, values: Iterable[tuple[str, Tensor]]) -> None:
        for leaf, value in values if not self._step and not call.repeated else ():
            name = Name(call.path, kind, leaf, call.number)
            self._put(str(name), value, call.parent)
            if self._training and value.requires_grad:
                gradient = str(name._replace(kind=f"grad_{kind}"))
                value.register_hook(partial(lambda key, grad: self._put(key, grad, call.parent), gradient))

    def _moved(self, _: str, value: Tensor) -> Tensor:
        return value if self._random is None or value.is_nested else jitter(value, self._random)

    def _gradients(self, optimizer: Any, *_: Any) -> None:
        names = {id(value): name for name, value in _tensors(self._model)}
        for position, group in enumerate(optimizer.param_groups):
            plain = {key: each for key, each in group.items() if isinstance(each, (int, float, tuple))}
            self.seen.modules.setdefault(f"(optimizer {position})", _text(type(optimizer).__name__, plain))
            for each in group["params"]:
                if each.grad is not None and id(each) in names:
                    self._put(names[id(each)].replace(":param", ":param_grad"), each.grad)

    def _updates(self, before: dict[str, Sketch]) -> None:
        for name, value in _tensors(self._model):
            if ":param" in name:
                after = sketch(value)
                self._put(name.replace(":param", ":update"), after.minus(before[name]))
                before[name] = after

    def _put(self, name: str, value: Tensor | Sketch, parent: str | None = None) -> None:
        """Add a value. The first one of a name and a step counts."""
        key = f"{name} step {self._step}" if self._step else name
        if key not in self.seen.sites:
            made = value if isinstance(value, Sketch) else sketch(value)
            self.seen.sites[key] = replace(made, parent=parent)


def observe(
    model: Any, inputs: Any, steps: int, seed: int | None = None, known: State | None = None, cast: Any = None
) -> Observation:
    """Call a model on ``inputs``, or train it for a few steps.

    A model that is called is left unchanged; one that is compiled runs a second time, eagerly. For a training,
    ``model()`` returns a new model and a function that does one step and returns the loss.

    ``known``  sketch the weights as well, except for those whose checksum is known
    ``cast``   convert the floating-point inputs to this dtype
    """
    if steps:
        _seed(0)
        match model():
            case (nn.Module() as made, step) if callable(step):
                return _Observer(made, seed, {}, training=True).run(step, steps)
        raise CompareError("a training needs a function that returns (model, step), with step(i) -> loss")
    if not isinstance(model, nn.Module) or inputs is None:
        raise CompareError(
            f"a golden needs an nn.Module and inputs=(x,), or a function and steps= for a training; not "
            f"{type(model).__name__} and {type(inputs).__name__}"
        )
    call, compiled = feed_of(inputs, cast), any(map(_is_compiled, model.modules()))
    observer = _Observer(model, seed, known, training=False)
    observer.seen.batch = _batch_of(inputs)
    with untouched(model, in_place=compiled), default_dtype(cast):
        if compiled:
            _seed(0)
            observer.seen.results = [sketch(value) for _, value in leaves(call(model))]
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            return observer.run(lambda _: call(model), 1)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or bool(getattr(module, "_compiled_call_impl", None))


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the persistent buffers by the names of their sites."""
    for place in places(model):
        passing = getattr(place.module, "_non_persistent_buffers_set", ())
        for kind, tensors in (("param", place.module._parameters), ("buffer", place.module._buffers)):
            for name, value in tensors.items():
                if value is not None and name not in passing:
                    yield str(Name(place.path, kind, name)), value


def _weight(value: Tensor, known: Sketch | None) -> Sketch:
    """Return the sketch of a weight; the known one if the checksum is the same."""
    plain = np.ascontiguousarray(value_of_tensor(value).array)
    digest = f"{SharedFolder.checksum(plain, len(plain)):08x}"
    return known if known is not None and known.digest == digest else replace(sketch(value), digest=digest)


def in_order_of(wanted: list[int], inputs: Any) -> Any:
    """Return the inputs with the batch in the golden's order, if it is the same batch in another order."""
    batch = _batch_of(inputs)
    if batch == wanted or sorted(batch) != sorted(wanted):
        return inputs
    order = torch.tensor([batch.index(row) for row in wanted])

    def reordered(_: str, value: Tensor) -> Tensor:
        return value[order.to(value.device)] if value.dim() and len(value) == len(order) else value

    return map_leaves(inputs, reordered)


def _batch_of(inputs: Any) -> list[int]:
    """Return a checksum of each row of a batch; nothing if the inputs have no batch dimension."""
    values = [] if callable(inputs) else [value for _, value in leaves(inputs) if value.dim()]
    rows = len(values[0]) if values and len(values[0]) <= _ROWS else 0
    alike = [value_of_tensor(value).array for value in values if len(value) == rows]
    return [SharedFolder.checksum(b"".join(each[row].tobytes() for each in alike)) for row in range(rows)]


def _described(module: nn.Module) -> str:
    plain = {name: value for name, value in vars(module).items() if type(value) in (int, float, str, bool)}
    shown = {name: plain[name] for name in sorted(plain) if name[0] != "_" and name != "training"}
    own = list(module.parameters(recurse=False))
    if own and not any(each.requires_grad for each in own):
        shown["frozen"] = True
    kind: Any = type(module)
    return _text(kind.__name__, shown, _source(kind))


@cache  # torch's own layers are known by their version; reading a file takes longer than a small model
def _source(kind: type) -> str:
    with suppress(OSError, TypeError):
        return "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
    return ""


def _text(kind: str, settings: dict[str, Any], source: str = "") -> str:
    """Return a class with its settings and a checksum of its source."""
    listed = ", ".join(f"{name}={value!r}" for name, value in settings.items())[:600]
    return f"{kind}({listed}) {SharedFolder.checksum(source.encode()):08x}"
