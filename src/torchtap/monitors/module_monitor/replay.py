"""Run parts of the reference on the model's own values, each on the same value once.

A container's first child is given the container's own input: what it answered there is what it would be run for
again. Parts come from the inside out; an answer that is to be remembered is used by the next container that asks for
it. It guarantees:
- values that a part is run on are as before: a part that might write into its input is given a copy;
- a remembered answer is used only for the very same value, and only if nobody has changed either in place;
- a part is as before when it has run, whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import activation, batchnorm, conv, normalization, pooling

from torchtap._torch import compiled_in_place, has_global_hooks, version_of
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.structure import map_leaves
from torchtap.hooks.untraced import Hook
from torchtap.monitors.module_monitor.reference import pooled_copy
from torchtap.reduce.kernel import fetch
from torchtap.store.write.pool import HostPool

__all__ = ["Replay", "fetch_weight", "is_function"]

# A product with few rows takes a weight in an order in which it waits for most of its memory; the reference's weights
# were last used in another pass, and are far away. To read them in order first takes little more than half the time.
# These are the bytes of a weight that is unlikely to be in the cache, and of one that has room in it.
_FAR, _CACHED = 64 << 10, 512 << 10

# Modules of torch that answer with the same function of their input whatever was learned ...
_FUNCTIONS = frozenset(
    {
        *(
            getattr(activation, name)
            for name in ("ELU", "GELU", "Hardswish", "LeakyReLU", "Mish", "ReLU", "ReLU6")
        ),
        *(getattr(activation, name) for name in ("SiLU", "Sigmoid", "Softmax", "Softplus", "Tanh")),
        *(
            pooling.MaxPool1d,
            pooling.MaxPool2d,
            pooling.AvgPool1d,
            pooling.AvgPool2d,
            pooling.AdaptiveAvgPool2d,
        ),
        *(nn.Flatten, nn.Identity),
    }
)
# ... and those that neither write into it, nor hand it on for others to write into, nor draw random numbers.
_CALM = _FUNCTIONS - {nn.Flatten, nn.Identity} | {
    *(nn.Linear, nn.Embedding, conv.Conv1d, conv.Conv2d, conv.Conv3d),
    *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d),
    *(normalization.LayerNorm, normalization.GroupNorm, normalization.RMSNorm),
}


def is_function(module: nn.Module, reference: nn.Module) -> bool:
    """Whether both give the same answer to the same value, always."""
    return (
        type(module) in _FUNCTIONS
        and type(reference) is type(module)
        and not getattr(module, "inplace", False)
        and "forward" not in reference.__dict__
        and repr(module) == repr(reference)
    )


def fetch_weight(linear: nn.Module) -> None:
    """Read a weight in order, ahead of a product with few rows."""
    weight = linear._parameters.get("weight")
    if weight is not None:
        fetch(weight, _FAR, _CACHED)


def _forward(part: nn.Module, args: Args, kwargs: Kwargs) -> object:
    """What a part's forward returns; of a linear without its search for weight and bias."""
    own: Any = part._parameters
    if type(part) is nn.Linear and len(args) == 1 and "weight" in own and "bias" in own:
        fetch_weight(part)
        return functional.linear(args[0], own["weight"], own["bias"])
    return part.forward(*args, **kwargs)


def _is_calm(module: nn.Module) -> bool:
    """Whether a module writes into no input and draws no random number, as far as its code is known."""
    if "forward" in module.__dict__ or getattr(module, "inplace", False):
        return False
    if type(module) is nn.Sequential:
        return len(module) > 0 and all(_is_calm(part) for part in module)
    return type(module) in _CALM


@final
class _Answer:
    """What a part answered to which arguments, and how old all of these were."""

    __slots__ = ("args", "output", "versions")

    def __init__(self, args: Args, output: Tensor) -> None:
        self.args = args
        self.output = output
        self.versions = [*map(_version, args), _version(output)]

    def is_ageless(self) -> bool:
        """Whether one of these keeps no version, so that nothing would prove it unchanged."""
        return min(self.versions) < 0

    def is_to(self, args: Args) -> bool:
        """Whether it is the answer to these arguments."""
        return len(args) == len(self.args) and all(map(is_, args, self.args))

    def is_unchanged(self) -> bool:
        """Whether nobody has written into it or into what it is an answer to."""
        return [*map(_version, self.args), _version(self.output)] == self.versions


@final
class Replay:
    """Runs parts of a reference, and keeps the answers that a container is going to ask for.

    ``own`` are the functions that the monitor and its checks have put on modules. ``aside`` is entered around a call
    that goes through hooks: the own ones hear nothing of it, and no random number is used up.
    """

    def __init__(
        self, own: Set[Callable[..., object]], aside: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._own = own
        self._aside = aside
        self._answers: dict[nn.Module, _Answer] = {}
        self._calm: dict[nn.Module, bool] = {}
        # By id: a copy that is given in place of a value, its version when it was made, and the value.
        self._stand_ins: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._pool = HostPool(limit=64 << 20)

    def has_other_hook(self, part: nn.Module) -> bool:
        """Whether a part has hooks, but for the monitor's own, or is compiled: calling it may do more than its forward.

        Hooks on all modules of the process are another question.
        """
        if part._forward_pre_hooks or compiled_in_place(part) is not None:
            return True
        own = self._own
        for hook in part._forward_hooks.values():  # noqa: SIM110 (asked for every module: a generator takes longer)
            if type(hook) is not Hook or hook.func not in own:
                return True
        return False

    def output_of(self, part: nn.Module, args: Args, kwargs: Kwargs, *, remember: bool) -> object:
        """What a part answers to a call. ``remember`` it where a container gets the same arguments."""
        calm = self._calm.get(part)
        if calm is None:
            calm = self._calm[part] = _is_calm(part)
        if calm and not has_global_hooks():
            output = self._run_calm(part, args, kwargs)
        else:
            output = self._run(part, map_leaves(args, self._stand_in), map_leaves(kwargs, self._stand_in))
        if remember and not kwargs and isinstance(output, Tensor):
            answer = _Answer(args, output)
            if not answer.is_ageless():
                self._answers[part] = answer
        return output

    def forget(self) -> None:
        """Let go of all answers."""
        self._answers.clear()

    def _run_calm(self, part: nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Run a part whose code is known past the monitor's hooks, which would hear nothing now."""
        is_sequence = bool(part._modules)
        if self.has_other_hook(part) or (is_sequence and (kwargs or len(args) != 1)):
            return self._run(part, args, kwargs)
        if not is_sequence:
            return _forward(part, args, kwargs)
        value = args[0]
        for each in part._modules.values():
            assert each is not None
            known = self._remembered(each, (value,)) if each in self._answers else None
            value = self._run_calm(each, (value,), {}) if known is None else known
        return value

    def _run(self, part: nn.Module, args: Args, kwargs: Kwargs) -> object:
        shadowed = [(each, each.__dict__.get("forward")) for each in self._answers if each is not part]
        for each, _ in shadowed:
            # Put beside nn.Module.__setattr__, which would look for parameters and buffers.
            each.__dict__["forward"] = _Remembering(self, each, each.forward)
        try:
            with self._aside():
                return part(*args, **kwargs)
        finally:
            for each, own in shadowed:
                if own is None:
                    del each.__dict__["forward"]
                else:
                    each.__dict__["forward"] = own
            self._stand_ins.clear()

    def _stand_in(self, _: str, value: Tensor) -> Tensor:
        """A copy that may be written into."""
        copy = pooled_copy(self._pool, value)
        self._stand_ins[id(copy)] = (copy, _version(copy), value)
        return copy

    def _remembered(self, part: nn.Module, args: Args) -> Tensor | None:
        """What a part answered to these arguments. It is handed out once: whoever gets it may change it."""
        answer = self._answers.get(part)
        if answer is None or not answer.is_to(tuple(map(self._original, args)) if self._stand_ins else args):
            return None
        del self._answers[part]
        return answer.output if answer.is_unchanged() else None

    def _original(self, value: Any) -> Any:
        """The value that a copy stands in for, if nobody has written into the copy."""
        known = self._stand_ins.get(id(value))
        return known[2] if known is not None and known[1] == _version(known[0]) else value


@final
class _Remembering:
    """In place of a part's forward while a container of it runs."""

    def __init__(self, replay: Replay, part: nn.Module, forward: Any) -> None:
        self._replay = replay
        self._part = part
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = None if kwargs else self._replay._remembered(self._part, args)
        return self._forward(*args, **kwargs) if known is None else known


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0
