"""Which modules of a process are the models of a training: who owns what an optimizer changes, and what is called."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from torchtap.spi import parameters_of

__all__ = ["called_models", "held_by", "roots_of"]


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """The identities of all parameters that these optimizers change."""
    return {id(parameter) for each in optimizers for parameter in parameters_of(each)}


def roots_of(parameters: set[int]) -> list[nn.Module]:
    """The outermost modules, in the order they were made, that own any of these parameters."""
    alive = [
        each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__
    ]
    parents: dict[int, list[nn.Module]] = {}
    for module in alive:
        for child in module._modules.values():  # an empty place gets an entry, too, that nobody asks for
            parents.setdefault(id(child), []).append(module)
    owners = [m for m in alive if any(id(each) in parameters for each in m._parameters.values())]
    found = {id(root) for module in owners for root in _outermost(module, parents)}
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
    holds = [called is not root and any(called is inner for inner in root.modules()) for root in roots]
    for root, is_holder in zip(roots, holds, strict=True):
        if is_holder:
            models |= {name: part for name, part in root.named_children() if _has_parameters(part)}
        else:
            models[_free_name(type(root).__name__, models)] = root
    if len(models) == 1 and not any(holds):
        return {"": next(iter(models.values()))}
    return models


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _free_name(wanted: str, taken: Iterable[str]) -> str:
    names = set(taken)
    number = 2
    name = wanted
    while name in names:
        name = f"{wanted}{number}"
        number += 1
    return name
