"""Probes of the training loop: gradients, updates, what the optimizer holds, modes, data loaders."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchtap._torch import AnyDropout, RunningNorm, version_of
from torchtap._torch_distributed import local_part
from torchtap.diagnosis.chart import Structure
from torchtap.diagnosis.probes.base import (
    ListeningProbe,
    Patient,
    Telling,
    held_anywhere,
    is_nonzero,
    nonzero_among,
)
from torchtap.forms.op.passes import PassHooks
from torchtap.plan.names import read_name, site_name
from torchtap.receive import training
from torchtap.spi import StepListener, parameters_of

_MOST = 12
_GRADIENT_LOOKS = 16  # live steps with a backward; by then a loop has shown what it does


@final
class GradientProbe(ListeningProbe):
    """Hears every backward and every update."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._tell = tell
        self._watched: dict[int, tuple[str, nn.Parameter]] = {
            id(parameter): (name, parameter) for name, parameter in patient.some_parameters(_MOST).items()
        }
        self._before: dict[int, tuple[int, int] | None] = {}
        self._updated: set[int] = set()  # parameters that were updated while this probe listened
        self._touched: set[int] = set()  # that got gradients since their update
        self._stale: dict[int, int] = {}  # parameter to the gradient that was not set back
        self._made: set[int] = set()  # whose gradient was not zero after a backward
        self._looks = 0

    # -- backward -----------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        self._before = {}
        if not self._tell.live or self._looks >= _GRADIENT_LOOKS:
            return
        suspects: dict[int, Tensor] = {}
        for key, (_, parameter) in self._watched.items():
            gradient = parameter.grad
            if gradient is None:
                self._before[key] = None
                self._stale.pop(key, None)
                continue
            self._before[key] = (id(gradient), version_of(gradient))
            first = key in self._updated and key not in self._touched
            if first or key in self._stale:
                suspects[key] = gradient
            else:
                self._stale.pop(key, None)
        for (key, gradient), left in zip(suspects.items(), nonzero_among([*suspects.values()]), strict=True):
            if left:
                self._stale[key] = id(gradient)
            else:
                self._stale.pop(key, None)

    def backward_ends(self) -> None:
        changed: dict[int, Tensor] = {}
        for key, before in self._before.items():
            gradient = self._watched[key][1].grad
            if gradient is not None and before != (id(gradient), version_of(gradient)):
                changed[key] = gradient
        self._touched.update(changed)
        flags = nonzero_among([*changed.values()])
        self._made.update(key for key, nonzero in zip(changed, flags, strict=True) if nonzero)
        self._before = {}

    # -- the optimizer ------------------------------------------------------------------------------------

    def ready(self, optimizer: Optimizer) -> None:
        if not self._tell.live or self._looks >= _GRADIENT_LOOKS:
            return
        held = [key for key in map(id, parameters_of(optimizer)) if key in self._watched]
        for key in held:
            if self._uses_stale(key):
                self._fact("stale-gradient", key)
        made = [key for key in held if key in self._made]
        if not any(is_nonzero(self._watched[key][1].grad) for key in made[:1]) and not any(
            nonzero_among([each for key in made[1:] if (each := self._watched[key][1].grad) is not None])
        ):
            for key in made:
                self._fact("erased-gradient", key)

    def _uses_stale(self, key: int) -> bool:
        return key in self._touched and self._stale.get(key) == id(self._watched[key][1].grad)

    def _fact(self, name: str, key: int) -> None:
        path, _, leaf, _ = read_name(self._watched[key][0])
        self._tell.fact(name, site_name(path, "param_grad", leaf))

    def updated(self, optimizer: Optimizer) -> None:
        self._looks += self._tell.live
        for key in map(id, parameters_of(optimizer)):
            if key in self._watched:
                self._updated.add(key)
                for known in (self._touched, self._made):
                    known.discard(key)
                self._stale.pop(key, None)

    def skipped(self, optimizer: Optimizer) -> None:
        self.updated(optimizer)


_UNUSED = (
    20  # gradients that were set back and computed anew; fewer may be a look at the data before a training
)
_EMPTY = 2  # updates without any gradient
_RENEWED = 3  # updates in a row, each by an optimizer that was never seen before


@final
class UpdateProbe(ListeningProbe):
    """Hears every backward, and every update of whatever optimizer."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._tell = tell
        self._names = patient.names
        watched = patient.some_parameters(1)  # one stands for all
        self._name = next(iter(watched), "")
        self._parameter = watched.get(self._name)
        self._backwards = self._unused = self._empty = self._new = 0
        self._updated = self._reached = False
        self._first: str | None = None  # of the parameters that the first optimizer held
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def start(self) -> None:
        if self._parameter is not None:
            super().start()

    def stop(self) -> None:
        super().stop()
        if self._reached and not self._updated and self._backwards > _EMPTY:
            self._tell_unused()

    # -- backward -----------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if self._updated or self._parameter is None:
            return
        if self._reached and self._parameter.grad is None:
            self._unused += 1
            if self._unused == _UNUSED:
                self._tell_unused()

    def backward_ends(self) -> None:
        self._backwards += 1
        if not self._updated and self._parameter is not None:
            self._reached |= self._parameter.grad is not None

    def _tell_unused(self) -> None:
        text = f"backward() was called {self._backwards} times and no optimizer has stepped"
        self._tell.fact("never-updated", self._name, float(self._backwards), text)

    # -- the optimizer ------------------------------------------------------------------------------------

    def ready(self, optimizer: Optimizer) -> None:
        if self._empty < 0:
            return
        parameters = parameters_of(optimizer)
        if self._names.keys().isdisjoint(map(id, parameters)):
            return
        if self._reached or any(each.grad is not None for each in parameters):
            self._empty = -1  # something learns: what does not is for others to say
            return
        self._empty += 1
        if self._empty >= _EMPTY:
            self._tell_nothing_learns()
            self._empty = -1

    def _tell_nothing_learns(self) -> None:
        text = "backward() did not reach the model" if self._backwards else "backward() was never called"
        for name in self._names.values():
            self._tell.fact("nothing-learns", name, float(self._backwards), text)

    def updated(self, optimizer: Optimizer) -> None:
        if self._new < 0:
            return
        held = (self._names.get(id(each)) for each in parameters_of(optimizer))
        first = next((name for name in held if name is not None), None)
        if first is None:
            return
        self._updated = True
        if optimizer in self._known:
            self._new = -1  # it comes again: no optimizer is made for each step
            return
        self._known.add(optimizer)
        self._first = first if self._first is None else self._first
        self._new += bool(optimizer.state) and first == self._first  # not one for each part of the model
        if self._new >= _RENEWED:
            text = f"{self._new} updates, each by another {type(optimizer).__name__}"
            self._tell.fact("optimizer-renewed", first, float(self._new), text)
            self._new = -1


_FROZEN = 64  # elements
_UPDATE_LOOKS = 4  # updates in live steps that are looked at


@final
class MembershipProbe(ListeningProbe):
    """Compares what has gradients with what optimizers hold, at the first updates."""

    def __init__(self, patient: Patient, tell: Telling, tell_structure: Callable[[Structure], None]) -> None:
        self._patient = patient
        self._tell = tell
        self._tell_structure = tell_structure
        self._held: dict[int, str] = {}  # parameters of optimizers that stepped, and the optimizer's class
        self._structure: Structure | None = None
        self._fresh = is_fresh(patient)
        self._looks: dict[int, int] = {}
        self._learning = 0  # how many parameters require a gradient
        self._frozen: list[tuple[Tensor, Tensor]] = []  # frozen ones with a gradient, before an update

    def ready(self, optimizer: Optimizer) -> None:
        if not self._tell.live:
            return
        self._look_for_thawed()
        looks = self._looks.get(id(optimizer), 0)
        if looks >= _UPDATE_LOOKS:
            return
        self._looks[id(optimizer)] = looks + 1
        kind = type(optimizer)
        parameters = parameters_of(optimizer)
        self._held.update((id(each), f"{kind.__module__}.{kind.__qualname__}") for each in parameters)
        if any(group.get("maximize") for group in optimizer.param_groups):
            self._tell.fact("maximises", ":output", text=f"{kind.__name__} has maximize=True")
        self._look_at_structure()
        self._look_for_strangers(parameters)
        self._frozen = [
            (each, local_part(each).reshape(-1)[:_FROZEN].clone())
            for each in parameters
            if not each.requires_grad and each.grad is not None and id(each) in self._patient.names
        ]

    def updated(self, optimizer: Optimizer) -> None:
        for parameter, before in self._frozen:
            if not torch.equal(local_part(parameter).reshape(-1)[:_FROZEN], before):
                text = "requires_grad is False, a gradient is left, and the update changed it"
                self._tell.fact("frozen-moves", self._patient.names[id(parameter)], text=text)
        self._frozen = []

    def _look_for_thawed(self) -> None:
        """Parameters that are frozen or thawed on the way make it a new training: all is looked at again."""
        learning = sum(each.requires_grad for each in self._patient.parameters.values())
        if learning != self._learning:
            self._learning = learning
            self._looks.clear()

    def _look_at_structure(self) -> None:
        parameters = self._patient.parameters
        found = Structure(
            trainable=frozenset(name for name, each in parameters.items() if each.requires_grad),
            frozen=frozenset(name for name, each in parameters.items() if not each.requires_grad),
            optimized=frozenset(name for name, each in parameters.items() if id(each) in self._held),
            optimizers=tuple(sorted(set(self._held.values()))),
            fresh=self._fresh,
            sizes={name: each.numel() for name, each in parameters.items()},
        )
        if found != self._structure:
            self._structure = found
            self._tell_structure(found)

    def _look_for_strangers(self, parameters: list[Tensor]) -> None:
        suspects = self._suspects()
        if not suspects:
            return
        patient, held = self._patient, held_anywhere()
        strangers = {
            name: each for name, each in suspects.items() if id(each) not in held and is_nonzero(each.grad)
        }
        if any(id(each) in patient.names for each in parameters):
            for name, parameter in strangers.items():
                self._tell.fact("not-in-optimizer", name, float(parameter.numel()))
        elif strangers and held.isdisjoint(map(id, patient.parameters.values())):
            self._look_for_foreign(parameters, strangers)

    def _suspects(self) -> dict[str, nn.Parameter]:
        """What has a gradient, and no optimizer that stepped so far holds."""
        learning = {name: each for name, each in self._patient.parameters.items() if each.requires_grad}
        return {
            name: each
            for name, each in learning.items()
            if each.grad is not None and id(each) not in self._held
        }

    def _look_for_foreign(self, parameters: list[Tensor], strangers: dict[str, nn.Parameter]) -> None:
        """An optimizer that holds nothing of a model that nobody else holds: whether it is idle, so meant for it."""
        if any(each.grad is not None for each in parameters):
            return
        name, parameter = next(iter(strangers.items()))
        text = f"{len(parameters)} tensors of the optimizer have no gradient, {len(strangers)} of the model have one"
        self._tell.fact("foreign-optimizer", name, float(parameter.numel()), text)


def is_fresh(patient: Patient) -> bool:
    """Return True if weights are as they were initialised: norms at one and zero, biases within their first bounds.

    Training moves all of these at once, so one that has moved is enough to say no.
    """
    with torch.no_grad():
        return all(_looks_fresh(place.module) for place in patient.places)


def _looks_fresh(module: nn.Module) -> bool:
    weight, bias = _values_of(module, "weight"), _values_of(module, "bias")
    if weight is None:
        return True
    if weight.dim() == 1:
        return _is_constant(weight) and (bias is None or bool((bias == 0).all()))
    if bias is None or bias.dim() != 1:
        return True
    return _is_constant(bias) or float(bias.abs().max()) <= 1.01 / max(1, _fan_in(module)) ** 0.5


def _values_of(module: nn.Module, name: str) -> Tensor | None:
    """What this rank has of a parameter, or every rank would have to look; None where there is nothing to look at."""
    whole: Tensor | None = module._parameters.get(name)
    if whole is None or whole.is_meta or isinstance(whole, nn.parameter.UninitializedParameter):
        return None
    part = local_part(whole)
    return part if part.is_floating_point() and part.numel() else None


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())


def _fan_in(module: nn.Module) -> int:
    """How many numbers one output is made of."""
    shape = module.get_parameter("weight").shape  # of the whole
    return shape[1] if "Transpose" in type(module).__name__ else shape[1:].numel()


_STATISTICS = 50  # updates after which running statistics are looked at
_SETTLED = 3  # updates after which a training has shown which passes are its own
_EVALUATION_LOOKS = 3


def has_mode(module: nn.Module) -> bool:
    """Return True if a module does other things in training than in evaluation."""
    if isinstance(module, AnyDropout):
        return module.p > 0
    return isinstance(module, RunningNorm) and module.track_running_stats


@final
class ModeProbe(StepListener):
    """Hears the beginning of each pass of what the user calls, and each update."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._modal = [(place.path, place.module) for place in patient.places if has_mode(place.module)]
        self._norms = [
            (place.path, place.module) for place in patient.places if isinstance(place.module, RunningNorm)
        ]
        self._before: list[int] = []  # changes of the norms' statistics when an evaluation began
        self._hooks = [PassHooks(model, self) for model in patient.called]
        self._updates = 0
        self._own_looks = False  # passes without gradients belong to the training itself
        self._learned_in_training = self._learned_in_eval = False
        self._evaluations = 0
        self._in_eval_updates = 0
        self.in_evaluation = False  # a pass of an evaluation is running, one of the first

    def start(self) -> None:
        if self._patient.called:
            training.listen(self)
            for hooks in self._hooks:
                hooks.switch_on()

    def stop(self) -> None:
        training.stop_listening(self)
        for hooks in self._hooks:
            hooks.switch_off()

    # -- passes -------------------------------------------------------------------------------------------

    def begin_pass(self, training: bool | None = None) -> None:
        learning = torch.is_grad_enabled()
        if learning:
            self._learned_in_training |= training is not False
            self._learned_in_eval |= training is False
        elif training:
            self._look_at_silent_pass()
        elif training is False and self._evaluations < _EVALUATION_LOOKS:
            self._evaluations += 1
            self.in_evaluation = True
            self._before = [_changes(module) for _, module in self._norms]
            self._look_at_evaluation()

    def end_pass(self) -> None:
        if self.in_evaluation:
            self.in_evaluation = False
            for (path, module), before in zip(self._norms, self._before, strict=True):
                # Whatever the flags say: statistics that move are changed by what is evaluated.
                if _changes(module) != before and not _is_reestimated(module):
                    text = "its running statistics moved"
                    self._tell.fact("ignores-eval", site_name(path, "output"), text=text)

    def _look_at_silent_pass(self) -> None:
        if self._updates < _SETTLED:
            self._own_looks = True
        on = [
            (path, module) for path, module in self._modal if module.training and not _is_reestimated(module)
        ]
        if self._own_looks or not on:
            return
        for path, _ in on:
            self._tell.fact("evaluates-in-train", site_name(path, "output"))

    def _look_at_evaluation(self) -> None:
        modal = [(path, module) for path, module in self._modal if module.training]
        kinds = {type(module) for _, module in modal}
        alike = [module for _, module in self._modal if type(module) in kinds]
        # All dropout layers at once are left on by somebody who wants several samples of one answer.
        if modal and (len(alike) > len(modal) or len(self._modal) == len(modal) == 1):
            for path, _ in modal:
                self._tell.fact("ignores-eval", site_name(path, "output"))

    # -- updates ------------------------------------------------------------------------------------------

    def updated(self, optimizer: Optimizer) -> None:
        only_eval = self._learned_in_eval and not self._learned_in_training
        self._learned_in_eval = self._learned_in_training = False
        self._updates += 1
        if self._updates == _STATISTICS:
            self._look_at_statistics()
        self._in_eval_updates = self._in_eval_updates + 1 if only_eval else 0
        if self._in_eval_updates < 2 or any(module.training for _, module in self._modal):
            return
        if self._modal and self._learns_mostly():
            for path, _ in self._modal:
                self._tell.fact("trains-in-eval", site_name(path, "output"))

    def _look_at_statistics(self) -> None:
        """Note norms whose running statistics are still mostly the initial ones."""
        for path, module in self._norms:
            momentum, seen = module.momentum, module.num_batches_tracked
            if (
                not momentum
                or seen is None
                or not module.training
                or not _SETTLED <= int(seen) <= 4 * _STATISTICS
            ):
                continue
            left = (1 - momentum) ** int(seen)
            if left > 0.9:
                text = f"momentum {momentum:g}: after {int(seen)} batches {left:.1%} of them is their initial value"
                self._tell.fact("slow-statistics", site_name(path, "output"), left, text)

    def _learns_mostly(self) -> bool:
        """Return True if at least half of the model learns: the rest of a frozen one may well be in evaluation."""
        parameters = self._patient.parameters.values()
        learning = sum(each.numel() for each in parameters if each.requires_grad)
        return 2 * learning >= sum(each.numel() for each in parameters)


def _is_reestimated(module: nn.Module) -> bool:
    """Batch norm without a momentum averages over all batches: somebody computes its statistics anew."""
    return isinstance(module, RunningNorm) and module.momentum is None


def _changes(module: nn.Module) -> int:
    """How often the statistics of a norm were changed."""
    return sum(version_of(each) for each in module._buffers.values() if each is not None)


@final
class LoaderProbe:
    """Hears when a loader is opened."""

    def __init__(self, tell: Telling) -> None:
        self._tell = tell
        self._original: Any = None

    def start(self) -> None:
        original = self._original = DataLoader.__iter__

        @functools.wraps(original)
        def opened(loader: Any) -> Any:
            self._note(loader)
            return original(loader)

        DataLoader.__iter__ = opened  # type: ignore[method-assign]

    def stop(self) -> None:
        if self._original is not None:
            DataLoader.__iter__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _note(self, loader: Any) -> None:
        try:
            batches = len(loader)
        except TypeError:
            return  # a stream has no length
        if batches > 1:
            self._tell.fact(
                "several-batches", ":input", float(batches), f"a DataLoader with {batches} batches is in use"
            )
