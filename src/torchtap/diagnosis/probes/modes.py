"""In which mode passes come: training without gradients, updates in evaluation, a module in a mode of its own."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from torchtap._torch import AnyDropout, RunningNorm, version_of
from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.forms.op.passes import PassHooks
from torchtap.plan.names import site_name
from torchtap.receive import training
from torchtap.receive.ears import Ears

__all__ = ["ModeProbe", "has_mode"]

_SETTLED = 3  # updates after which a training has shown which passes are its own
_LOOKS = 3


def has_mode(module: nn.Module) -> bool:
    """Whether a module does other things in training than in evaluation."""
    if isinstance(module, AnyDropout):
        return module.p > 0
    return isinstance(module, RunningNorm) and module.track_running_stats


@final
class ModeProbe(Ears):
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
        elif training is False and self._evaluations < _LOOKS:
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
        self._in_eval_updates = self._in_eval_updates + 1 if only_eval else 0
        if self._in_eval_updates < 2 or any(module.training for _, module in self._modal):
            return
        if self._modal and self._learns_mostly():
            for path, _ in self._modal:
                self._tell.fact("trains-in-eval", site_name(path, "output"))

    def _learns_mostly(self) -> bool:
        """Whether at least half of the model learns: the rest of a frozen one may well be in evaluation."""
        parameters = self._patient.parameters.values()
        learning = sum(each.numel() for each in parameters if each.requires_grad)
        return 2 * learning >= sum(each.numel() for each in parameters)


def _is_reestimated(module: nn.Module) -> bool:
    """Batch norm without a momentum averages over all batches: somebody computes its statistics anew."""
    return isinstance(module, RunningNorm) and module.momentum is None


def _changes(module: nn.Module) -> int:
    """How often the statistics of a norm were changed."""
    return sum(version_of(each) for each in module._buffers.values() if each is not None)
