"""Experiments on a copy of the model: change one sample, one position, one input, and see which outputs change.

They run once, after the first updates, if a doctor is made with ``probe=True``. The copy, its random numbers and its
mode are its own: the training is the same with and without them.
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling
from torchtap.forms.op.passes import PassHooks
from torchtap.spi import leaves, map_leaves, unwrap

__all__ = ["ExperimentProbe"]

_AFTER = 2  # updates
_SAME = 1e-4  # of an output's size: less is rounding


@final
class ExperimentProbe(ListeningProbe):
    """Keeps the arguments of one training call and experiments with them after the first updates."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._tell = tell
        self._model = patient.called[0] if len(patient.called) == 1 else None
        self._hooks = None if self._model is None else PassHooks(self._model, self, None, self._called)
        self._given: tuple[Any, Any] | None = None
        self._updates = 0

    def start(self) -> None:
        super().start()
        if self._hooks is not None:
            self._hooks.switch_on()

    def stop(self) -> None:
        super().stop()
        if self._hooks is not None:
            self._hooks.switch_off()
            self._hooks = None

    def begin_pass(self, training: bool | None = None) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def _called(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            self._given = (args, kwargs)

    def updated(self, optimizer: Optimizer) -> None:
        self._updates += 1
        given, self._given = self._given, None
        if self._updates != _AFTER or given is None or self._model is None:
            return
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                _Experiment(copy.deepcopy(unwrap(self._model)).eval(), given, self._tell).run()
        except Exception:
            pass  # a model that cannot be copied or called by itself is not experimented with


@final
class _Experiment:
    """One model in evaluation mode and the arguments of one call."""

    def __init__(self, model: nn.Module, given: tuple[Any, Any], tell: Telling) -> None:
        self._model, self._given, self._tell = model, given, tell
        self._inputs = {leaf: tensor for leaf, tensor in leaves(given) if tensor.dim() and tensor.numel() > 1}
        self._answer = self._call({})

    def run(self) -> None:
        """Change each input: all of it, one sample of it, its last position."""
        if self._answer is None or _differ(self._answer, self._call({})):
            return  # it answers at random, or with nothing that can be compared
        for leaf, tensor in self._inputs.items():
            changed = self._call({leaf: _other(tensor)})
            if not _differ(self._answer, changed):
                self._tell.fact(
                    "unused-input",
                    ":input",
                    text=f"any change of argument {leaf!r} leaves the output as it is",
                )
                continue
            if tensor.dim() > 1 and len(tensor) > 1 and len(tensor) == len(self._answer):
                self._one_sample(leaf, tensor)
            if tensor.dim() > 1 and self._answer.dim() > 2 and tensor.shape[:2] == self._answer.shape[:2]:
                self._last_position(leaf, tensor)

    def _one_sample(self, leaf: str, tensor: Tensor) -> None:
        mixed = tensor.clone()
        mixed[0] = _other(tensor)[0]
        answer = self._call({leaf: mixed})
        if answer is not None and self._answer is not None and _differ(self._answer[1:], answer[1:]):
            share = _share(self._answer[1:], answer[1:])
            text = f"a change of sample 0 alone changes {share:.0%} of the other samples' outputs"
            self._tell.fact("mixes-samples", ":output", share, text)

    def _last_position(self, leaf: str, tensor: Tensor) -> None:
        later = tensor.clone()
        later[:, -1] = _other(tensor)[:, -1]
        answer = self._call({leaf: later})
        if answer is not None and self._answer is not None:
            share = _share(self._answer[:, :-1], answer[:, :-1])
            self._tell.fact("future-share", ":output", share)

    def _call(self, replaced: dict[str, Tensor]) -> Tensor | None:
        args, kwargs = map_leaves(self._given, lambda leaf, tensor: replaced.get(leaf, tensor))
        found = [
            tensor
            for _, tensor in leaves(self._model(*args, **kwargs))
            if tensor.is_floating_point() and tensor.dim()
        ]
        return found[0] if found else None


def _other(tensor: Tensor) -> Tensor:
    """Return other values of the same sort: shuffled over all elements, and shifted for numbers."""
    mixed = tensor.reshape(-1)[torch.randperm(tensor.numel())].view(tensor.shape)
    return mixed + tensor.std() if tensor.is_floating_point() else mixed


def _differ(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.shape != other.shape or _share(one, other) > 0)


def _share(one: Tensor, other: Tensor) -> float:
    """Return the share of elements that differ by more than rounding."""
    return float(((one - other).abs() > _SAME * (one.abs().mean() + 1e-12)).float().mean())
