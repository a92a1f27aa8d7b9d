"""Probes of one rank: how its gradients are reduced, which buffers are sent, its waiting time, its number of targets.

Nothing is asked of other ranks. Rules compare what ranks noted when a run is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from torchtap._torch import saved_by
from torchtap.diagnosis.chart import BROADCAST, PAST_THE_WRAPPER, SCALED, SECONDS, TARGETS, UNSYNCED, WEIGHT
from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.spi import Hooks

_NODES = 24
_SUMS = ("Add", "Sum", "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone")
_MEAN = 1  # torch's number for reduction="mean"


@final
class TargetProbe(ListeningProbe):
    """Counts the targets of each live step."""

    def __init__(self, tell: Telling) -> None:
        self._tell = tell
        self._targets: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0  # of all targets together

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if root is None or not self._tell.live:
            return
        try:
            with torch.no_grad():
                found = list(_losses(root.grad_fn))
                for targets, weight in found:
                    self._targets = self._targets + targets
                    self._weight = self._weight + targets * weight
        except RuntimeError:
            return  # what a node has kept was freed or changed
        if found:
            self._tell.number(TARGETS, self._targets)
            self._tell.number(WEIGHT, self._weight / self._targets)

    def backward_ends(self) -> None:
        pass

    def updated(self, optimizer: Optimizer) -> None:
        self._targets = self._weight = 0.0

    def skipped(self, optimizer: Optimizer) -> None:
        self.updated(optimizer)


def _losses(first: Node | None) -> Iterator[tuple[Tensor | float, Tensor | float]]:
    """Of each loss function in a graph: how many targets it has, and what one of them counts."""
    waiting: list[tuple[Node | None, Tensor | float]] = [(first, 1.0)]
    for _ in range(_NODES):
        if not waiting:
            return
        node, factor = waiting.pop()
        if node is None:
            continue
        reduction = saved_by(node, "reduction")
        if reduction is not None:
            targets, total = _counted(node)
            if targets is not None:
                yield targets, factor / total if reduction == _MEAN else factor
            continue
        below = [each for each, _ in node.next_functions]
        waiting += [(each, found) for each, found in zip(below, _factors(node, factor), strict=False)]


def _factors(node: Node, factor: Tensor | float) -> list[Tensor | float]:
    """What the values below a node are multiplied by; nothing where it does anything else."""
    name = node.name()
    other, own = saved_by(node, "other"), saved_by(node, "self")
    if name.startswith("Div"):
        return [] if not _is_number(other) else [factor / other]
    if name.startswith("Mul"):
        return [factor * each if _is_number(each) else float("nan") for each in (other, own)]
    if name.startswith("Mean"):
        count = saved_by(node, "self_sym_numel")
        return [] if not count else [factor / int(count)]
    return [factor, factor] if name.startswith(_SUMS) else []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _counted(node: Node) -> tuple[Tensor | float | None, Tensor | float]:
    """How many targets a loss function counts, and what it divides their sum by."""
    given, target = saved_by(node, "self"), saved_by(node, "target")
    if not isinstance(given, Tensor) or not isinstance(target, Tensor):
        return None, 1.0
    if node.name().startswith("NllLoss"):
        ignored = saved_by(node, "ignore_index")
        ignored = int(ignored) - (1 << 64) if ignored is not None and int(ignored) >= 1 << 63 else ignored
        total = saved_by(node, "total_weight")
        count = (target != ignored).sum().double()
        return count, count if total is None else total.double()
    return float(given.numel()), float(given.numel())


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
        self._hooks: list[Hooks] = []
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
                    hooks = Hooks(module)
                    hooks.before(module, partial(self._call, module))
                    self._hooks.append(hooks)

    def stop(self) -> None:
        super().stop()
        for hooks in self._hooks:
            hooks.remove()

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
