"""What the parameters of two models say: which of a module's own differ, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.patterns import pattern
from torchtap.plan.names import is_inside
from torchtap.plan.sites import places

__all__ = ["differing_parameters", "own_tensors", "usual_dtype", "whose_parameters"]


def differing_parameters(
    reference: nn.Module, target: nn.Module, module: str, names: Mapping[str, str] | None
) -> tuple[str, ...]:
    """A module's own parameters and buffers that are not the same in the target, each with how they differ."""
    theirs = module
    if names is not None:
        theirs = next((mine for mine, name in names.items() if name == module), module)
    try:
        left, right = own_tensors(reference, module), own_tensors(target, theirs)
    except AttributeError:
        return ()
    turned = names is not None and _held_transposed(reference, target, (module, theirs), names)
    notes = (
        _note(name, left.get(name), right.get(name), ported=names is not None, turned=turned)
        for name in dict.fromkeys([*left, *right])
    )
    return tuple(note for note in notes if note)


def _held_transposed(
    reference: nn.Module, target: nn.Module, pair: tuple[str, str], names: Mapping[str, str]
) -> bool:
    """Whether modules of these two types hold their weights transposed to each other (GPT-2's Conv1D and a Linear).

    A square weight does not show it; the others of the same two types do.
    """
    mine = {place.path: place.module for place in places(reference)}
    theirs = {place.path: place.module for place in places(target)}
    types = type(mine.get(pair[0])), type(theirs.get(pair[1]))
    for target_path, path in names.items():
        left, right = mine.get(path), theirs.get(target_path)
        if (type(left), type(right)) == types and types[0] is not types[1]:
            a, b = getattr(left, "weight", None), getattr(right, "weight", None)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape == a.shape[::-1]:
                return True
    return False


def _note(name: str, mine: Tensor | None, theirs: Tensor | None, *, ported: bool, turned: bool) -> str:
    """How one tensor differs; empty when it does not. A port may hold a tensor with its axes in another order."""
    if mine is None or theirs is None:
        return f"{name} is only in the {'target' if mine is None else 'reference'}"
    if turned and mine.dim() == 2 and mine.shape[::-1] == theirs.shape:
        square = mine.shape == theirs.shape and not torch.equal(mine, mine.T)
        if square and torch.equal(*_at_one_precision(mine, theirs)):
            return f"{name} is not transposed, as it is in other layers of these types"
        mine = mine.T
    if mine.shape != theirs.shape:
        if ported and sorted(mine.shape) == sorted(theirs.shape):
            return ""
        return (
            f"{name} has shape {tuple(mine.shape)} in the reference and {tuple(theirs.shape)} in the target"
        )
    mine, theirs = _at_one_precision(mine, theirs)
    return "" if torch.equal(mine, theirs) else _difference(name, mine, theirs)


def whose_parameters(
    reference: nn.Module,
    target: nn.Module,
    module: str,
    names: Mapping[str, str] | None,
    called: Collection[str],
) -> tuple[str, tuple[str, ...]]:
    """The module whose parameters make ``module`` wrong, and how they differ: itself, or the one inside it that is
    never called and whose parameters its forward uses by itself (a projection's ``weight @ x``)."""
    own = differing_parameters(reference, target, module, names)
    if own or not isinstance(reference, nn.Module):
        return module, own
    inside = [place.path for place in places(reference) if is_inside(place.path, module)]
    held = {
        path: notes
        for path in inside
        if path not in called and (notes := differing_parameters(reference, target, path, names))
    }
    return next(iter(held.items())) if len(held) == 1 else (module, ())


def _at_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the coarser of their dtypes: a lower precision of the same numbers is no difference."""
    dtype = a.dtype if resolution(a.dtype) >= resolution(b.dtype) else b.dtype
    return a.to(dtype), b.to(a.device, dtype)


def _difference(name: str, a: Tensor, b: Tensor) -> str:
    named = pattern(a, b)
    if named:
        return f"{name} is {named}"
    unequal = int((a != b).sum())
    return f"{name} differs in {unequal} of {a.numel()} elements"


def own_tensors(model: nn.Module, path: str) -> dict[str, Tensor]:
    """The parameters and buffers of one module itself; an ``AttributeError`` when there is no such module."""
    module = next((place.module for place in places(model) if path in (place.path, *place.other_paths)), None)
    if module is None:
        raise AttributeError(path)
    return {
        **{name: p.detach() for name, p in module.named_parameters(recurse=False)},
        **dict(module.named_buffers(recurse=False)),
    }


def usual_dtype(model: object) -> tuple[torch.dtype | None, bool]:
    """The dtype that most of a model's numbers have, and whether all have it."""
    if not isinstance(model, nn.Module):
        return None, False
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        return None, False
    return max(counts, key=lambda dtype: counts[dtype]), len(counts) == 1
