"""Run a model once, or train it for a few steps, and sketch every value on the way.

Values are listed in the order of execution: inputs and outputs of each module's calls, then gradients in the order of
the backward pass, then the loss, parameter gradients and updates of each step. A run may add noise: each module's
output is multiplied by one plus or minus one unit in the last place. A model that is run forward is left unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtap.errors import CompareError
from torchtap.golden.sketch import Array, Sketch, sketch, sketch_rows
from torchtap.spi import Call, Name, Stop, Visiting, input_leaves, leaves, map_leaves, places, untouched

__all__ = ["Observation", "Seen", "State", "observe", "observe_training", "state_of"]

_ROWS = 512  # a larger batch is not looked through for its order
_SIGNS = 1 << 16
State = dict[str, tuple[str, Sketch]]  # a digest and a sketch of each parameter and persistent buffer


class Seen(NamedTuple):
    """One value, and the module whose code made the call (``None``: the caller of the model)."""

    sketch: Sketch
    parent: str | None = None


@final
@dataclass(slots=True)
class Observation:
    """Everything that one run showed."""

    sites: dict[str, Seen] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)  # class, settings, hash of the source
    rows: dict[str, Array] = field(default_factory=dict)  # of each input that has a batch dimension
    results: list[Sketch] = field(default_factory=list)  # of a compiled model, whose sites were seen eagerly
    flags: dict[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)  # the weights before a training

    def put(self, name: str, value: Tensor, parent: str | None = None) -> None:
        """Add a value. A name that is taken gets the number of its repetition."""
        key, number = name, 1
        while key in self.sites:
            key, number = f"{name} again {number}", number + 1
        self.sites[key] = Seen(sketch(value), parent)


@final
class _Watcher:
    """Sketch the inputs and outputs of modules. With ``seed``, perturb them as well."""

    def __init__(self, into: Observation, seed: int | None, *, gradients: bool = False) -> None:
        self._into, self._gradients, self.active = into, gradients, True
        self._random = None if seed is None else torch.Generator().manual_seed(seed)

    def before(self, call: Call, args: Any, kwargs: Any) -> Any:
        if self.active and not call.repeated:
            for leaf, value in input_leaves(call.input_names, args, kwargs, through_objects=False):
                self._put(call, "input", leaf, value)
        if self._random is None or call.parent is not None:
            return None
        return map_leaves(args, self._moved), map_leaves(kwargs, self._moved)

    def after(self, call: Call, output: object) -> Any:
        changed = output if self._random is None else map_leaves(output, self._moved)
        if self.active and not call.repeated:
            for leaf, value in leaves(changed, through_objects=False):
                self._put(call, "output", leaf, value)
        return None if self._random is None else changed

    def _put(self, call: Call, kind: str, leaf: str, value: Tensor) -> None:
        self._into.put(str(Name(call.path, kind, leaf, call.number)), value, call.parent)
        if self._gradients and value.requires_grad:
            name = str(Name(call.path, f"grad_{kind}", leaf, call.number))
            value.register_hook(lambda gradient: self._into.put(name, gradient, call.parent))

    def _moved(self, _: str, value: Tensor) -> Tensor:
        """Return the value with each element moved by one unit in the last place, up or down."""
        if self._random is None or not value.is_floating_point() or not value.numel():
            return value
        if float(value.detach().abs().max()) > torch.finfo(value.dtype).max / 4:
            return value  # a mask of the dtype's lowest number would overflow
        signs = torch.randint(0, 2, (_SIGNS,), generator=self._random).double() * 2 - 1
        factors = (1 + torch.finfo(value.dtype).eps * signs).to(value.dtype)
        repeated = factors.repeat(-(-value.numel() // _SIGNS))[: value.numel()]
        return value * repeated.view(value.shape).to(value.device)


def observe(
    model: nn.Module, inputs: Any, seed: int | None = None, cast: torch.dtype | None = None
) -> Observation:
    """Call the model on ``inputs`` and return what was seen. ``cast`` converts the floating-point inputs."""
    modules = {place.path: _described(place.module) for place in places(model)}
    seen = Observation(modules=modules, flags=_flags(model))
    if not callable(inputs):
        batches = [(leaf, value) for leaf, value in leaves(inputs) if value.dim() and value.numel()]
        seen.rows = {leaf: sketch_rows(value) for leaf, value in batches if 1 < len(value) <= _ROWS}
    compiled = any(
        type(each).__name__ == "OptimizedModule" or getattr(each, "_compiled_call_impl", None) is not None
        for each in model.modules()
    )
    stops = [Stop(place.path, place.module) for place in places(model)]
    with untouched(model, in_place=compiled):
        if compiled and seed is None:
            _seed(0)
            seen.results = [sketch(value) for _, value in leaves(_feed(model, inputs, cast))]
        _seed(0)
        eagerly = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with Visiting(model, _Watcher(seen, seed), stops, passes_apart=False), eagerly:
            result = _feed(model, inputs, cast)
        if not any(name.startswith(":output") for name in seen.sites):
            for leaf, value in leaves(result):  # another method of the module was called
                seen.put(str(Name("", "output", leaf)), value)
        for name, value in _state(model, "_buffers") if model.training else ():
            seen.put(name, value)
    return seen


def observe_training(make: Callable[[], Any], steps: int, seed: int | None = None) -> Observation:
    """Train for a few steps. ``make()`` returns a new model and a function that does one step and returns the loss."""
    _seed(0)
    made = make()
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])
    ):
        raise CompareError("a training needs a function that returns (model, step), with step(i) -> loss")
    model, step = made
    modules = {place.path: _described(place.module) for place in places(model)}
    seen = Observation(modules=modules, flags=_flags(model), state=state_of(model))
    watcher, number = _Watcher(seen, seed, gradients=True), 0
    owned = {id(value): Name.parse(name) for name, value in _state(model, "_parameters")}
    before = {name: each for name, (_, each) in seen.state.items()}

    def gradients(optimizer: Any, *_: Any) -> None:
        for position, group in enumerate(optimizer.param_groups):
            plain = {
                key: str(value) for key, value in group.items() if isinstance(value, (int, float, tuple))
            }
            for key, value in {"class": type(optimizer).__name__, **plain}.items():
                seen.flags.setdefault(f"optimizer {position} {key}", value)
            for each in group["params"]:
                if each.grad is not None and id(each) in owned:
                    name = owned[id(each)]._replace(kind="param_grad")
                    seen.put(f"{name}{_at(number)}", each.grad)

    stops = [Stop(place.path, place.module) for place in places(model)]
    handle = register_optimizer_step_pre_hook(gradients)
    try:
        with Visiting(model, watcher, stops, passes_apart=False):
            for number in range(steps):
                _seed(number)
                loss = step(number)
                watcher.active = False  # later steps are decided by their loss, gradients and updates
                seen.put(f":value.loss{_at(number)}", torch.as_tensor(loss))
                for name, value in _state(model, "_parameters"):
                    after = sketch(value)
                    update = Name.parse(name)._replace(kind="update")
                    seen.sites[f"{update}{_at(number)}"] = Seen(after.minus(before[name]))
                    before[name] = after
    finally:
        handle.remove()
    for name, value in _state(model, "_buffers"):
        seen.put(name, value)
    return seen


def state_of(model: nn.Module, known: State | None = None) -> State:
    """Return a digest and a sketch of each parameter and persistent buffer. Those of a known digest are reused."""
    found = {}
    for name, value in [*_state(model, "_parameters"), *_state(model, "_buffers")]:
        digest, old = _digest(value), (known or {}).get(name)
        found[name] = old if old is not None and old[0] == digest else (digest, sketch(value))
    return found


def _at(step: int) -> str:
    return f" step {step}" if step else ""


def _seed(number: int) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(number)


def _feed(model: Any, inputs: Any, cast: torch.dtype | None) -> Any:
    if callable(inputs):
        return inputs(model)

    def fresh(_: str, value: Tensor) -> Tensor:
        copied = value.detach().clone().requires_grad_(value.requires_grad)
        return copied.to(cast) if cast is not None and value.is_floating_point() else copied

    given = map_leaves(inputs, fresh)
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple) else model(given)


def _state(model: nn.Module, which: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters or the persistent buffers by the names of their sites."""
    kind = "param" if which == "_parameters" else "buffer"
    for place in places(model):
        passing = getattr(place.module, "_non_persistent_buffers_set", ())
        for name, value in getattr(place.module, which).items():
            if value is not None and name not in passing:
                yield str(Name(place.path, kind, name)), value


def _digest(value: Tensor) -> str:
    """Return a hash of the bits, from sums along rows and columns: as fast as memory is read."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    whole = flat[: len(flat) // 8 * 8].view(torch.int64)
    width = max(math.isqrt(len(whole)), 1)
    grid = whole[: len(whole) // width * width].view(-1, width)
    hashed = hashlib.blake2b(str((tuple(value.shape), value.dtype)).encode(), digest_size=8)
    for part in (grid.sum(0), grid.sum(1), whole[grid.numel() :], flat[len(whole) * 8 :]):
        hashed.update(part.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def _described(module: nn.Module) -> str:
    """Return the class with its settings, and a hash of the source of a class that is not torch's."""
    plain = {name: value for name, value in vars(module).items() if type(value) in (int, float, str, bool)}
    own = list(module.parameters(recurse=False))
    shown = ["frozen"] if own and not any(each.requires_grad for each in own) else []
    shown += [
        f"{name}={value!r}" for name, value in sorted(plain.items()) if name[0] != "_" and name != "training"
    ]
    kind, text = type(module), ""
    if not kind.__module__.startswith("torch."):
        with suppress(OSError, TypeError):
            text = inspect.getsource(kind)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{kind.__name__}({', '.join(shown)[:600]}) {digest}"


def _flags(model: nn.Module) -> dict[str, Any]:
    """Return the settings of the library that numbers depend on."""
    return {
        "training": model.training,
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
