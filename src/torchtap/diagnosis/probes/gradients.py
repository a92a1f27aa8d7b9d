"""Whether gradients are set back before they are computed anew, and are still there when the optimizer wants them.

A few parameters, spread over the model, stand for all. A gradient is stale when the first backward since its update
adds to what the update before had used. It counts only if that optimizer then uses it: the discriminator of a GAN has
gradients of the generator's loss, which are set back before its own.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch import version_of
from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling, is_nonzero
from torchtap.plan.names import read_name, site_name
from torchtap.receive.training import parameters_of

__all__ = ["GradientProbe"]

_MOST = 12
_LOOKS = 16  # live steps with a backward; by then a loop has shown what it does


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
        if not self._tell.live or self._looks >= _LOOKS:
            return
        for key, (_, parameter) in self._watched.items():
            gradient = parameter.grad
            if gradient is None:
                self._before[key] = None
                self._stale.pop(key, None)
                continue
            self._before[key] = (id(gradient), version_of(gradient))
            first = key in self._updated and key not in self._touched
            if (first or key in self._stale) and is_nonzero(gradient):
                self._stale[key] = id(gradient)
            else:
                self._stale.pop(key, None)

    def backward_ends(self) -> None:
        for key, before in self._before.items():
            gradient = self._watched[key][1].grad
            if gradient is not None and before != (id(gradient), version_of(gradient)):
                self._touched.add(key)
                if is_nonzero(gradient):
                    self._made.add(key)
        self._before = {}

    # -- the optimizer ------------------------------------------------------------------------------------

    def ready(self, optimizer: Optimizer) -> None:
        if not self._tell.live or self._looks >= _LOOKS:
            return
        held = [key for key in map(id, parameters_of(optimizer)) if key in self._watched]
        for key in held:
            if self._uses_stale(key):
                self._fact("stale-gradient", key)
        made = [key for key in held if key in self._made]
        if not any(is_nonzero(self._watched[key][1].grad) for key in made):
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
