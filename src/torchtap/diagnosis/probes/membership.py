"""Which parameters learn, which optimizer holds them, and whether both agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch_distributed import local_part
from torchtap.diagnosis.facts import Structure
from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling, held_anywhere, is_nonzero
from torchtap.receive.training import parameters_of

__all__ = ["MembershipProbe", "is_fresh"]

_LOOKS = 4  # updates in live steps that are looked at


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

    def ready(self, optimizer: Optimizer) -> None:
        if not self._tell.live:
            return
        self._look_for_thawed()
        looks = self._looks.get(id(optimizer), 0)
        if looks >= _LOOKS:
            return
        self._looks[id(optimizer)] = looks + 1
        kind = type(optimizer)
        parameters = parameters_of(optimizer)
        self._held.update((id(each), f"{kind.__module__}.{kind.__qualname__}") for each in parameters)
        if any(group.get("maximize") for group in optimizer.param_groups):
            self._tell.fact("maximises", ":output", text=f"{kind.__name__} has maximize=True")
        self._look_at_structure()
        self._look_for_strangers(parameters)

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
    """Whether weights are as they were initialised: norms at one and zero, biases within their first bounds.

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
