"""What probes have in common: whom they tell, and what they know of the model."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch_distributed import local_part
from torchtap.plan.names import site_name
from torchtap.receive import backward, training
from torchtap.spi import StepListener, places

__all__ = [
    "ListeningProbe",
    "Patient",
    "Probe",
    "Telling",
    "held_anywhere",
    "is_nonzero",
    "nonzero_among",
    "read_flags",
]


class Telling(Protocol):
    """Whom probes tell."""

    @property
    def live(self) -> bool:
        """Return True if this step is one that is looked at."""

    @property
    def step(self) -> int:
        """The number of this step."""

    def fact(self, name: str, site: str, value: float = 0.0, text: str = "") -> None:
        """Something that was seen; told once for each name and site."""

    def number(self, site: str, value: float | Tensor) -> None:
        """A number of this step."""


class Probe(Protocol):
    """What a doctor sets up and takes down."""

    def start(self) -> None:
        """Listen from now on."""

    def stop(self) -> None:
        """Leave everything as it was."""


class ListeningProbe(StepListener):
    """A probe that hears every backward and every optimizer."""

    def start(self) -> None:
        """Listen from now on."""
        backward.listen(self)
        training.listen(self)

    def stop(self) -> None:
        """Leave everything as it was."""
        backward.stop_listening(self)
        training.stop_listening(self)

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        pass

    def backward_ends(self) -> None:
        pass


@final
class Patient:
    """A model's modules and parameters by their names."""

    def __init__(self, tree: nn.Module, called: Iterable[Any]) -> None:
        self.tree = tree
        self.called = [each for each in called if isinstance(each, nn.Module)]  # what the user calls
        self.places = places(tree)
        self.paths = {id(place.module): place.path for place in self.places}
        self.parameters: dict[str, nn.Parameter] = {}
        self.owners: dict[str, nn.Module] = {}
        known: set[int] = set()
        for place in self.places:
            for leaf, parameter in place.module._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    name = site_name(place.path, "param", leaf)
                    self.parameters[name], self.owners[name] = parameter, place.module
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.compiled = any(_is_compiled(module) for module in (*self.called, *tree.modules()))

    def some_parameters(self, most: int) -> dict[str, nn.Parameter]:
        """Trainable parameters, evenly spread over the model."""
        learning = {name: each for name, each in self.parameters.items() if each.requires_grad}
        stride = max(1, -(-len(learning) // most))
        return dict(list(learning.items())[::stride])


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Return 0-dim tensors as bools. The host waits once for each device."""
    found = [False] * len(flags)
    for device in {flag.device for flag in flags}:
        places = [place for place, flag in enumerate(flags) if flag.device == device]
        together = torch.stack([flags[place].bool() for place in places]).tolist()
        for place, flag in zip(places, together, strict=True):
            found[place] = flag
    return found


def nonzero_among(values: Sequence[Tensor]) -> list[bool]:
    """Return for each value True if it is not all zero. The host waits once for each device."""
    counts = []
    for value in values:
        local = local_part(value)  # the whole of one that is spread over ranks would be a collective
        counts.append(torch.count_nonzero(local.coalesce().values() if local.is_sparse else local))
    return read_flags(counts)


def is_nonzero(value: Tensor | None) -> bool:
    """Return True if there is a value that is not all zero."""
    return value is not None and nonzero_among([value])[0]


def held_anywhere() -> set[int]:
    """The identities of all tensors that any living optimizer holds. Looks through the process: for suspicions only."""
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return {
        id(parameter)
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    }
