"""Modules and tensors that a model holds in plain Python: in no tree, so in no optimizer and no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from torch import Tensor, nn

from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling, held_anywhere, is_nonzero
from torchtap.plan.names import join_path, site_name

__all__ = ["HiddenProbe"]

_LOOKS = 3
_DEEP = 4  # lists in lists
_LONG = 10_000


@final
class HiddenProbe(ListeningProbe):
    """After the first backwards: what is hidden and got a gradient is used, and learns nothing."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._looks = 0

    def backward_ends(self) -> None:
        if self._looks >= _LOOKS or not self._tell.live:
            return
        self._looks += 1
        found = {site: tensor for site, tensor in self._hidden() if is_nonzero(tensor.grad)}
        if found:
            held = held_anywhere()
            for site, tensor in found.items():
                if id(tensor) not in held:
                    self._tell.fact("hidden-module", site, float(tensor.numel()))

    def _hidden(self) -> Iterator[tuple[str, Tensor]]:
        known = {id(place.module) for place in self._patient.places}
        for place in self._patient.places:
            for name, value in vars(place.module).items():
                if not name.startswith("_"):
                    yield from self._inside(join_path(place.path, name), place.path, name, value, known, 0)

    def _inside(
        self, path: str, owner: str, name: str, value: object, known: set[int], depth: int
    ) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, nn.Module):
            if id(value) not in known:
                for leaf, parameter in value.named_parameters():
                    yield site_name(path, "param", leaf), parameter
        elif isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf and id(value) not in self._patient.names:
                yield site_name(owner, "param", name), value
        elif depth < _DEEP:
            for key, each in _items(value):
                inner = join_path(path, str(key))
                yield from self._inside(inner, owner, f"{name}.{key}", each, known, depth + 1)


def _items(value: object) -> list[tuple[object, object]]:
    """What of a plain container may hold a parameter, by key; nothing of a very long one: it is data."""
    if not isinstance(value, (list, tuple, dict)) or len(value) >= _LONG:
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, each) for key, each in items if isinstance(each, (nn.Module, Tensor, list, tuple, dict))]
