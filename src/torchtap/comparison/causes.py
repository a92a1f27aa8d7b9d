"""Name causes in two live models: parameters that differ, exact relations of values, a cut gradient, the source line.

Not here: which module is wrong (`judge`).
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from torchtap.comparison.explain import differing_term, hidden_only, pattern
from torchtap.comparison.passes import Feed, Trace, golden_copy, jitter, visiting
from torchtap.comparison.result import Comparison, FirstDifference
from torchtap.comparison.values import resolution
from torchtap.comparison.words import in_target
from torchtap.hooks.leaves import Args, Kwargs, input_leaves, leaves
from torchtap.hooks.visit import Call
from torchtap.plan.names import is_inside, join_path, last_part, parent_path, read_name, site_name
from torchtap.plan.sites import places, unwrap
from torchtap.untouched import untouched

__all__ = [
    "broken_flow",
    "differing_parameters",
    "harmless_copies",
    "located",
    "own_tensors",
    "relation",
    "source_of",
    "usual_dtype",
    "whose_parameters",
]


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


def relation(model: nn.Module, trace: Trace, site: str, own: Tensor) -> str:
    """Describe how the target's own value at a site follows from the reference's, if the relation is exact."""
    reference = trace.values[site]
    author = next(event.author for event in trace.events if event.site == site)
    return (
        pattern(reference, own)
        or differing_term(reference, own, _terms(model, trace, author or "", site))
        or hidden_only(reference, own, _masks(trace))
    )


def _terms(model: nn.Module, trace: Trace, author: str, site: str) -> Iterator[tuple[str, Tensor]]:
    """What a module's own code adds up: its parameters, what it was given, what its children returned."""
    try:
        for name, value in own_tensors(model, author).items():
            yield join_path(author, name), value
    except AttributeError:  # a module of another name in the reference
        pass
    for event in trace.events:
        given = event.kind == "input" and event.module == author
        made = event.kind == "output" and event.module != "" and parent_path(event.module) == author
        if (given or made) and event.site != site:
            yield event.site, trace.values[event.site]


def _masks(trace: Trace) -> Iterator[tuple[str, Tensor]]:
    for event in trace.events:
        value = trace.values[event.site]
        if event.module == "" and event.kind == "input" and not value.is_floating_point():
            yield read_name(event.site).leaf, value


@final
class _Flow:
    """Notes of each value that passes whether a gradient will flow back through it."""

    def __init__(self) -> None:
        self.needs: dict[str, tuple[str | None, bool]] = {}

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        for leaf, value in input_leaves(call.input_names, args, kwargs, through_objects=False):
            self.needs[site_name(call.path, "input", leaf, call.number)] = (call.parent, value.requires_grad)

    def after(self, call: Call, output: object) -> None:
        for leaf, value in leaves(output, through_objects=False):
            self.needs[site_name(call.path, "output", leaf, call.number)] = (call.path, value.requires_grad)


def broken_flow(
    reference: nn.Module, target: nn.Module, feed: Feed, target_feed: Feed
) -> FirstDifference | None:
    """The first value that needs a gradient in one model alone, with the module that made it so."""
    mine, theirs = _flow(reference, feed), _flow(target, target_feed)
    for at, (site, (author, needed)) in enumerate(mine.items()):
        there = theirs.get(site)
        if there is None or there[1] == needed:
            continue
        what = (
            "no gradient flows back, in the reference it does (a detach, no_grad, or a frozen parameter)"
            if needed
            else "a gradient flows back, in the reference none does"
        )
        return FirstDifference(
            site=site,
            module=author or "",
            index=at,
            error=float("nan"),
            floor=float("nan"),
            origin="structure",
            sure="likely",
            what=what,
        )
    return _frozen(reference, target)


def _frozen(reference: nn.Module, target: nn.Module) -> FirstDifference | None:
    """A parameter that learns in one model alone, though the values around it flow in both."""
    theirs = dict(target.named_parameters())
    for at, (name, parameter) in enumerate(reference.named_parameters()):
        there = theirs.get(name)
        if there is not None and there.requires_grad != parameter.requires_grad:
            module, leaf = parent_path(name), last_part(name)
            return FirstDifference(
                site=site_name(module, "param_grad", leaf),
                module=module,
                index=at,
                error=float("nan"),
                floor=float("nan"),
                origin="structure",
                sure="likely",
                what=f"{leaf} has requires_grad={there.requires_grad}, in the reference {parameter.requires_grad}",
            )
    return None


def _flow(model: nn.Module, feed: Feed) -> dict[str, tuple[str | None, bool]]:
    visitor = _Flow()
    with untouched(model), torch.enable_grad():
        torch.manual_seed(0)
        with visiting(model, visitor):
            feed(model)
    return visitor.needs


def harmless_copies(reference: nn.Module) -> list[tuple[str, Callable[[], nn.Module], torch.dtype | None]]:
    """Copies of the reference whose gradients may differ only harmlessly, each with the dtype that it runs in."""

    def moved() -> nn.Module:
        copied = copy.deepcopy(reference)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in copied.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(_jittered(parameter, generator))
        return copied

    def golden() -> nn.Module:
        copied, why = golden_copy(reference)
        if copied is None:
            raise ValueError(why)
        return copied

    return [("one ULP", moved, None), ("float64", golden, torch.float64)]


def _jittered(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return jitter(parameter.detach(), generator)


def located(result: Comparison, target: object) -> Comparison:
    """The same result, its first divergence with the source of the target's module where that is known."""
    if result.first is None or result.first.source or not isinstance(target, nn.Module):
        return result
    if isinstance(target, torch.jit.ScriptModule):
        return result  # its classes are TorchScript's own
    source = source_of(unwrap(target), in_target(result.first, result.rows))
    if not source:
        return result
    verdict = f"{result.verdict} Its code is {source}."
    return replace(result, first=replace(result.first, source=source), verdict=verdict)


def source_of(model: nn.Module, path: str) -> str:
    """``file.py:12 (Block.forward)`` of the module at ``path``; of the one around it where torch wrote it."""
    modules = {other: place.module for place in places(model) for other in (place.path, *place.other_paths)}
    while True:
        module = modules.get(path)
        if module is not None and not type(module).__module__.startswith("torch."):
            return _lines_of(module)
        if not path:
            return "" if module is None else _lines_of(module)
        path = parent_path(path)


def _lines_of(module: nn.Module) -> str:
    try:
        forward = inspect.unwrap(type(module).forward)
        file, line = inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
        return f"{file}:{line} ({forward.__qualname__})" if file and os.path.exists(file) else ""
    except (OSError, TypeError):  # written in a prompt, generated, or in C
        return ""
