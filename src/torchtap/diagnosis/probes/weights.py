"""Weights against each other: rows that are copies, ties that are broken."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch_distributed import local_part, placed, spec_of
from torchtap.diagnosis.probes.base import ListeningProbe, Patient, Telling, is_nonzero
from torchtap.placement import Box
from torchtap.plan.names import site_name
from torchtap.receive.training import parameters_of

__all__ = ["WeightProbe"]

_LOOKS = 2


@final
class WeightProbe(ListeningProbe):
    """Looks at the first updates of a training, and at ties in each live step."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._tied = _tied(patient)
        self._twins = _twins(patient)
        self._looks = 0

    def start(self) -> None:
        super().start()
        for site, times in _repeated(self._patient):
            self._tell.fact("one-for-many", site, float(times))

    def ready(self, optimizer: Optimizer) -> None:
        if self._tell.live and self._looks < _LOOKS:
            held = set(map(id, parameters_of(optimizer)))
            with torch.no_grad():
                for name, parameter in self._patient.parameters.items():
                    if id(parameter) in held and _has_equal_rows(parameter):
                        self._tell.fact("equal-rows", name, float(len(parameter)))

    def updated(self, optimizer: Optimizer) -> None:
        if not self._tell.live:
            return
        self._looks += 1
        self._look_at_ties()
        if self._twins and self._looks <= _LOOKS:
            self._look_at_twins(optimizer)

    def _look_at_ties(self) -> None:
        for names in self._tied:
            holders = {id(module._parameters.get(leaf)) for _, module, leaf in names}
            if len(holders) > 1:
                path, _, leaf = names[-1]
                text = "they were one parameter at the start"
                self._tell.fact("untied", site_name(path, "param", leaf), text=text)

    def _look_at_twins(self, optimizer: Optimizer) -> None:
        held = set(map(id, parameters_of(optimizer)))
        for one, other in self._twins:
            first, second = self._patient.parameters[one], self._patient.parameters[other]
            if {id(first), id(second)} <= held and not _equal(first, second):
                text = f"it had the values of {one} when the training began"
                self._tell.fact("untied", other, text=text)


def _has_equal_rows(parameter: Tensor) -> bool:
    gradient = None if parameter.grad is None else local_part(parameter.grad)
    parameter = local_part(parameter)
    if parameter.dim() < 2 or len(parameter) < 2 or gradient is None or gradient.is_sparse:
        return False
    if not (torch.equal(parameter[0], parameter[1]) and torch.equal(gradient[0], gradient[1])):
        return False
    if not torch.equal(parameter, parameter[:1].expand_as(parameter)):
        return False
    return torch.equal(gradient, gradient[:1].expand_as(gradient)) and is_nonzero(gradient)


def _repeated(patient: Patient) -> list[tuple[str, int]]:
    """Layers with parameters that stand several times in one list, and how often."""
    found = []
    for place in patient.places:
        if isinstance(place.module, (nn.ModuleList, nn.Sequential)):
            inside = list(place.module._modules.values())
            for each in dict.fromkeys(inside):
                times = inside.count(each)
                if times > 1 and each is not None and next(each.parameters(), None) is not None:
                    found.append((site_name(patient.paths[id(each)], "output"), times))
    return found


def _tied(patient: Patient) -> list[list[tuple[str, nn.Module, str]]]:
    """The places of each parameter that has several."""
    slots: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for place in patient.places:
        for leaf, parameter in place.module._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((place.path, place.module, leaf))
    return [names for names in slots.values() if len(names) > 1]


def _twins(patient: Patient) -> list[tuple[str, str]]:
    """Embeddings and linear layers with the same values in different memory: as if tied."""
    embeddings, layers = [], []
    for name, parameter in patient.parameters.items():
        owner = patient.owners[name]
        if isinstance(owner, nn.Embedding):
            embeddings.append((name, parameter))
        elif isinstance(owner, nn.Linear) and parameter.dim() == 2:
            layers.append((name, parameter))
    with torch.no_grad():
        return [
            (one, other)
            for one, first in embeddings
            for other, second in layers
            if first.shape == second.shape and _equal(first, second) and bool(local_part(first).std() > 0)
        ]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two weights have the same values, as far as this rank holds both: to ask others would be a collective."""
    parts = _box(first), _box(second)
    if parts[0] == parts[1]:
        return torch.equal(local_part(first), local_part(second))
    if None in parts:  # one is whole
        box = parts[0] or parts[1]
        assert box is not None
        inside = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
        one, other = (
            local_part(each) if part else each[inside]
            for each, part in zip((first, second), parts, strict=True)
        )
        return torch.equal(one, other)
    return False  # they are divided otherwise: nobody holds both


def _box(weight: Tensor) -> Box | None:
    """The part of a weight that this rank holds; None for all of it."""
    spec = spec_of(weight)
    found = None if spec is None else placed(spec)
    if found is None or not found[1].boxes:
        return None
    (box, *more) = found[1].boxes
    return box if not more else Box((), ())
