"""Find the models that a script trains, from outside: the modules that own what its optimizers change.

An optimizer tells its parameters when it is made. The modules that own them, and the modules around those, are found
among all modules that are alive. The first call of one of them ends the search, and the models are handed over.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any, final
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from torchtap.integrations.first_call import FirstCall

__all__ = ["Discovery", "called_models", "roots_of"]

Found = Callable[[dict[str, nn.Module], list[Optimizer]], None]


@final
class Discovery:
    """Waits for the first call of a model that an optimizer of this process trains."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._first_call = FirstCall(self._on_call)
        original = self._original_init = Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._on_optimizer(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign]

    def _on_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        for root in roots_of(parameters_of([optimizer])):
            self._first_call.wait_for(root)

    def _on_call(self, module: nn.Module) -> None:
        self.stop()
        optimizers = list(self._optimizers)
        self._found(called_models(module, roots_of(parameters_of(optimizers))), optimizers)

    def stop(self) -> None:
        """Take everything off again."""
        self._first_call.stop()
        Optimizer.__init__ = self._original_init  # type: ignore[method-assign]


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The identities of all parameters that these optimizers change."""
    return {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}


def roots_of(parameters: set[int]) -> list[nn.Module]:
    """The outermost modules, in the order they were made, that own any of these parameters."""
    alive = [
        each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__
    ]
    parents: dict[int, list[nn.Module]] = {}
    for module in alive:
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    for module in alive:
        if any(id(parameter) in parameters for parameter in module._parameters.values()):
            for root in _outermost(module, parents):
                found[id(root)] = root
    return [module for module in alive if id(module) in found]


def _outermost(module: nn.Module, parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    waiting, seen, found = [module], set[int](), []
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        above = parents.get(id(one), [])
        waiting.extend(above)
        if not above:
            found.append(one)
    return found


def called_models(called: nn.Module, roots: list[nn.Module]) -> dict[str, nn.Module]:
    """The models to watch, each under its name.

    A root that is called is a model. A root that only holds the parts which are called (a LightningModule, a list) is
    left out in favour of its parts, under their own names. A single model has the empty name.
    """
    models: dict[str, nn.Module] = {}
    for root in roots:
        holds = called is not root and any(called is inner for inner in root.modules())
        if holds:
            parts = {
                name: part for name, part in root.named_children() if any(True for _ in part.parameters())
            }
            models |= parts
        else:
            models[_free_name(type(root).__name__, models)] = root
    if len(models) == 1 and not any(called is not root and called in root.modules() for root in roots):
        return {"": next(iter(models.values()))}
    return models


def _free_name(wanted: str, taken: Iterable[str]) -> str:
    names = set(taken)
    number = 2
    name = wanted
    while name in names:
        name = f"{wanted}{number}"
        number += 1
    return name
