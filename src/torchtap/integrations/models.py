"""Which modules of a process are the models of a training: who owns what an optimizer changes, and what is called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer

from torchtap.spi import parameters_of

__all__ = [
    "called_models",
    "free_name",
    "held_by",
    "loose_parameters",
    "owned_of",
    "roots_of",
    "variable_name",
]

_TREE = "_torchtap_tree"  # marks modules that only hold those of the user


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the identities of all parameters that these optimizers change."""
    return {id(parameter) for each in optimizers for parameter in parameters_of(each)}


def _alive() -> list[nn.Module]:
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [each for each in found if "_modules" in each.__dict__ and _TREE not in each.__dict__]


def roots_of(parameters: set[int]) -> list[nn.Module]:
    """Return the outermost modules, in the order they were made, that own any of these parameters."""
    alive = _alive()
    parents: dict[int, list[nn.Module]] = {}
    for module in alive:
        for child in module._modules.values():  # an empty place gets an entry, too, which is never looked up
            parents.setdefault(id(child), []).append(module)
    owners = [m for m in alive if any(id(each) in parameters for each in m._parameters.values())]
    found = {id(root) for module in owners for root in _outermost(module, parents)}
    return [module for module in alive if id(module) in found]


def owned_of(parameters: set[int]) -> set[int]:
    """Return the identities of those parameters that a module has."""
    return {id(each) for module in _alive() for each in module._parameters.values()} & parameters


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


def called_models(called: nn.Module | None, roots: list[nn.Module]) -> dict[str, nn.Module]:
    """Return the models to watch by name: that of the script's variable, or the class.

    A root that is called is a model. A root that only holds the parts which are called (a LightningModule, a list) is
    left out in favour of its parts, under their own names. A single model has the empty name.
    """
    models: dict[str, nn.Module] = {}
    holds = [called is not root and any(called is inner for inner in root.modules()) for root in roots]
    if len(roots) == 1 and not any(holds):
        return {"": roots[0]}
    names = _variables(roots)
    for root, is_holder in zip(roots, holds, strict=True):
        if is_holder:
            models |= {name: part for name, part in root.named_children() if _has_parameters(part)}
        else:
            models[free_name(names.get(id(root), type(root).__name__), models)] = root
    return models


def loose_parameters(optimizers: Iterable[Optimizer]) -> dict[str, nn.Module]:
    """Return a holder of the optimized parameters that belong to no module, named after the script's variables."""
    held = {id(each): each for one in optimizers for each in parameters_of(one)}
    for module in _alive():
        for each in module._parameters.values():
            held.pop(id(each), None)
    if not held:
        return {}
    holder = nn.Module()
    holder.__dict__[_TREE] = True
    names = _variables(held.values())
    for number, (key, tensor) in enumerate(held.items()):
        name = free_name(names.get(key, f"parameter{number}"), holder._parameters)
        holder._parameters[name] = tensor  # type: ignore[assignment]  # a plain tensor with requires_grad may be one
    return {"loose": holder}


def variable_name(value: object) -> str | None:
    """Return the name of the script's variable that holds this object."""
    return _variables([value]).get(id(value))


def _variables(values: Iterable[object]) -> dict[int, str]:
    """Return the names of variables that hold these objects, in the frames that run and in the main module."""
    wanted = {id(each) for each in values}
    found: dict[int, str] = {}
    for scope in _scopes():
        for name, value in list(scope.items()):
            if id(value) in wanted and name.isidentifier() and not name.startswith("_") and name != "self":
                found.setdefault(id(value), name)
    return found


def _scopes() -> Iterator[dict[str, object]]:
    """The main module's variables, then those of the frames that run, and the attributes of their ``self``."""
    main = sys.modules.get("__main__")
    yield dict(vars(main)) if main is not None else {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torchtap.", "torch.")):
            held = dict(frame.f_locals)
            yield held
            owner = held.get("self")
            if owner is not None and not isinstance(owner, (nn.Module, torch.Tensor)):
                yield dict(getattr(owner, "__dict__", {}))
        frame = frame.f_back


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """Return a name, or the name with a number if it is taken."""
    names = set(taken)
    number = 2
    name = wanted
    while name in names:
        name = f"{wanted}{number}"
        number += 1
    return name
