"""What a rank can say of itself: how its gradients came, who sends its buffers, and how long others wait for it.

Nothing is asked of any other rank. The rules put what ranks said beside each other when a run is read.
"""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling
from torchtap.diagnosis.rules.rank_gradients import PAST_THE_WRAPPER, SCALED, UNSYNCED
from torchtap.diagnosis.rules.rank_progress import SECONDS
from torchtap.diagnosis.rules.rank_state import BROADCAST
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.walker import Walker

__all__ = ["RankProbe"]

_SITE = ":output"


@final
class RankProbe(ListeningProbe):
    """Hears the calls of wrappers that reduce gradients, each backward and each update."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._tell = tell
        self._wrappers = [
            module
            for model in patient.called
            for module in model.modules()
            if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self._compiled = patient.compiled
        self._walkers: list[Walker] = []
        self._called: set[int] = set()  # wrappers, and modules in wrappers, that were called to learn
        self._synced: bool | None = None  # whether the newest backward reduced; None before one
        self._updated: float | None = None

    def start(self) -> None:
        super().start()
        if any(each.broadcast_buffers and any(True for _ in each.buffers()) for each in self._wrappers):
            self._tell.fact(BROADCAST, _SITE)
        if not self._compiled:
            for wrapper in self._wrappers:
                for module in (wrapper, wrapper.module):
                    walker = Walker(module)
                    walker.before(module, module, self._call, lambda *_: None)
                    self._walkers.append(walker)

    def stop(self) -> None:
        super().stop()
        for walker in self._walkers:
            walker.leave()

    def _call(self, module: Any, args: Args, kwargs: Kwargs) -> None:
        if torch.is_grad_enabled():
            self._called.add(id(module))

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        # A wrapper decides in its forward whether the backward after it is to reduce.
        self._synced = all(each.require_forward_param_sync for each in self._wrappers)
        if self._updated is not None and self._tell.live:
            self._tell.number(SECONDS, time.perf_counter() - self._updated)
        self._updated = None

    def backward_ends(self) -> None:
        pass

    def unscaling(self, optimizer: Optimizer) -> None:
        self._tell.fact(SCALED, _SITE)

    def ready(self, optimizer: Optimizer) -> None:
        if self._synced is None or not self._wrappers:
            return
        if not self._synced:
            self._tell.fact(UNSYNCED, _SITE)
        for wrapper in self._wrappers:
            if id(wrapper.module) in self._called and id(wrapper) not in self._called:
                self._tell.fact(PAST_THE_WRAPPER, _SITE)

    def updated(self, optimizer: Optimizer) -> None:
        self._called.clear()
        self._synced = None
        self._updated = time.perf_counter()

    def skipped(self, optimizer: Optimizer) -> None:
        self.updated(optimizer)
