"""What a step needs to be run again: what each model was called with, and everything that the call depended on.

A pass is kept from its call until the optimizer has used it, and a few steps longer. It holds copies of the arguments,
the random state, modes, autocast and buffers as the call found them, and what backward passes handed to the model's
outputs. With these and the weights, forward and backward give the same bits again, whatever the loss was.

It guarantees: what is kept takes at most ``limit`` bytes; the oldest go first, and a step that lost a pass says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchtap._torch import graph_task, version_of
from torchtap.forms.op.passes import PassHooks
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.leaves import leaves
from torchtap.hooks.structure import map_leaves
from torchtap.plan.sites import unwrap
from torchtap.receive.gradients import ask_for_gradient
from torchtap.session.random_state import RandomState

__all__ = ["Autocast", "Pass", "PassKeeper", "StepPasses", "copied"]


class Autocast(NamedTuple):
    """One device's autocast, where it was on."""

    device: str
    dtype: torch.dtype

    @classmethod
    def now(cls) -> tuple[Autocast, ...]:
        """What is on in this thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return tuple(cls(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@final
@dataclass(slots=True, eq=False)
class Pass:
    """One call of one model."""

    model: str
    args: Args
    kwargs: Kwargs
    random: RandomState
    modes: tuple[bool, ...]  # of all modules
    autocast: tuple[Autocast, ...]
    buffers: tuple[Tensor | None, ...]
    numbers: dict[
        tuple[int, str], Any
    ]  # plain attributes that change from pass to pass, by the module's position
    nbytes: int
    # backward pass -> output -> what it was handed. In the order in which they ran.
    seeds: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @contextmanager
    def conditions(self, model: nn.Module) -> Iterator[None]:
        """As the call found them: to be used inside `untouched`."""
        modules = list(unwrap(model).modules())
        if len(modules) == len(self.modes):
            for module, mode in zip(modules, self.modes, strict=True):
                module.training = mode
        for (holder, name), buffer in zip(_buffers_of(model), self.buffers, strict=False):
            if buffer is not None:
                holder._buffers[name] = buffer.clone()
        for (position, attribute), value in self.numbers.items():
            setattr(modules[position], attribute, value)
        self.random.put_back()
        with ExitStack() as stack:
            for each in self.autocast:
                stack.enter_context(torch.autocast(each.device, each.dtype))
            yield


@final
@dataclass(slots=True, eq=False)
class StepPasses:
    """The passes that led to one update."""

    step: int
    passes: list[Pass] = field(default_factory=list)
    dropped: int = 0  # passes that the limit did not leave room for


@final
class PassKeeper:
    """Keeps the passes of the last steps. ``where`` tells the number of the step that is open."""

    def __init__(
        self, models: Mapping[str, nn.Module], where: Callable[[], int], *, steps: int, limit: int
    ) -> None:
        self._where = where
        self._limit = limit
        self._held = 0
        self._paused = False
        self.current: StepPasses | None = None
        self.earlier: deque[StepPasses] = deque(maxlen=max(steps - 1, 0))
        self._listeners = [_OneModel(self, name, model) for name, model in models.items()]
        for each in self._listeners:
            each.hooks.switch_on()

    def add(self, kept: Pass) -> None:
        """A model was called."""
        if self.current is None:
            self.current = StepPasses(self._where())
        self.current.passes.append(kept)
        self._held += kept.nbytes
        while self._held > self._limit:
            self._drop_oldest()

    def take_seed(self, of: Pass, leaf: str, gradient: Tensor | None) -> None:
        """A backward pass has reached an output."""
        if not self._paused and gradient is not None:
            of.seeds.setdefault(graph_task(), {})[leaf] = gradient.detach()

    def next_step(self) -> None:
        """The optimizer has used the passes."""
        done, self.current = self.current, None
        if done is None:
            return
        for each in done.passes:
            each.seeds.clear()  # with these weights gone, they serve nothing
        if self.earlier.maxlen == 0 or len(self.earlier) == self.earlier.maxlen:
            gone = self.earlier.popleft() if self.earlier else done
            self._held -= sum(each.nbytes for each in gone.passes)
        if self.earlier.maxlen:
            self.earlier.append(done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which calls are not kept."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def listens(self) -> bool:
        """Whether a call that comes now is one of the training."""
        return not self._paused and torch.is_grad_enabled() and graph_task() == -1

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self._held

    def stop(self) -> None:
        """Leave the models as they were."""
        for each in self._listeners:
            each.hooks.switch_off()
        self.current = None
        self.earlier.clear()
        self._held = 0

    def _drop_oldest(self) -> None:
        steps = [*self.earlier, *([self.current] if self.current is not None else [])]
        oldest = next(each for each in steps if each.passes)
        self._held -= oldest.passes.pop(0).nbytes
        oldest.dropped += 1


class _OneModel:
    """Hears the calls of one model."""

    def __init__(self, keeper: PassKeeper, name: str, model: nn.Module) -> None:
        self._keeper, self._name, self._model = keeper, name, model
        self._modules = list(unwrap(model).modules())
        self._buffers = _buffers_of(model)
        self._snapshot: list[tuple[Tensor | None, int, Tensor | None]] = [(None, -1, None)] * len(
            self._buffers
        )
        self._counters = _Counters(self._modules)
        self._open: list[Pass] = []
        self.hooks = PassHooks(model, self, self._returned, self._called)

    def begin_pass(self, training: bool | None = None) -> None:
        pass

    def end_pass(self) -> None:
        if self._open:
            self._open.pop()

    def _called(self, args: Args, kwargs: Kwargs) -> None:
        if not self._keeper.listens:
            return
        (own_args, own_kwargs), nbytes = copied((args, kwargs))
        kept = Pass(
            self._name, own_args, own_kwargs, RandomState.now(), tuple(m.training for m in self._modules),
            Autocast.now(), self._buffers_now(), self._counters.now(), nbytes,
        )  # fmt: skip
        self._open.append(kept)
        self._keeper.add(kept)

    def _returned(self, output: object) -> None:
        if self._open and self._keeper.listens:
            for leaf, tensor in leaves(output):
                if tensor.requires_grad:
                    ask_for_gradient(tensor, partial(self._keeper.take_seed, self._open[-1], leaf))

    def _buffers_now(self) -> tuple[Tensor | None, ...]:
        """Copies of the buffers; those that did not change since the last pass share theirs."""
        for position, (holder, name) in enumerate(self._buffers):
            buffer = holder._buffers.get(name)
            known, version, _ = self._snapshot[position]
            if buffer is None:
                self._snapshot[position] = (None, -1, None)
            elif buffer is not known or version_of(buffer) != version or version < 0:
                self._snapshot[position] = (buffer, version_of(buffer), buffer.detach().clone())
        return tuple(copy for _, _, copy in self._snapshot)


class _Counters:
    """Plain numbers that modules count for themselves, such as how often they were called.

    All are looked at in the first passes; those that have changed by then are kept from then on.
    """

    _LOOKS = 3

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._before: dict[tuple[int, str], object] = {}
        self._changing: set[tuple[int, str]] = set()
        self._looks = 0

    def now(self) -> dict[tuple[int, str], Any]:
        """The numbers that change, as they are."""
        if self._looks <= self._LOOKS:
            found = {
                (position, name): value
                for position, module in enumerate(self._modules)
                for name, value in module.__dict__.items()
                if type(value) in (int, float, bool) and name != "training"
            }
            self._changing |= {key for key, value in found.items() if self._before.get(key, value) != value}
            self._before = found
            self._looks += 1
            return found
        return {
            (position, name): self._modules[position].__dict__.get(name) for position, name in self._changing
        }


def copied(tree: object) -> tuple[Any, int]:
    """A structure with copies of its tensors, which need gradients as the tensors did, and the copies' size."""
    known: dict[int, Tensor] = {}

    def copy(_: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            own = tensor.detach().clone()
            known[id(tensor)] = own.requires_grad_() if tensor.requires_grad else own
        return known[id(tensor)]

    made = map_leaves(tree, copy)
    return made, sum(each.element_size() * each.nelement() for each in known.values())


def _buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, name) for module in unwrap(model).modules() for name in module._buffers]
