"""Run the kept passes of a step again, forwards and backwards, with the weights as they are.

No loss function is needed: each backward pass starts at the model's outputs, with what it was handed there the first
time. Passes that one backward pass went through together go through one again, in the same order, so that gradients add
up in the same order. ``.grad`` is not touched and no hook that waits for it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchtap.diagnosis.flight.passes import Pass, copied
from torchtap.hooks.leaves import leaves

__all__ = ["Replayed", "replay"]


@final
@dataclass(slots=True, eq=False)
class Replayed:
    """What came of it. ``gradients`` are by the parameter's id; ``error`` is what a pass raised."""

    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Accumulate a gradient, as ``.grad`` would."""
        if gradient is not None:
            known = self.gradients.get(id(parameter))
            self.gradients[id(parameter)] = gradient if known is None else known + gradient


def replay(
    passes: Sequence[Pass], models: Mapping[str, nn.Module], inputs: Sequence[tuple[Any, Any]] | None = None
) -> Replayed:
    """Run passes again; to be called inside `untouched`. ``inputs``: arguments to use, else copies of the kept."""
    result = Replayed()
    waiting = _backwards(passes)
    try:
        for number, each in enumerate(passes):
            model = models[each.model]
            args, kwargs = inputs[number] if inputs is not None else copied((each.args, each.kwargs))[0]
            with each.conditions(model):
                output = model(*args, **kwargs)
            result.outputs.append(dict(leaves(output)))
            while waiting and max(waiting[0][1]) <= number:
                task, members = waiting.pop(0)
                _backward(result, passes, members, task, models)
            if not any(number in members for _, members in waiting):
                result.outputs[number] = {
                    leaf: value.detach() for leaf, value in result.outputs[number].items()
                }
    except Exception as error:  # a step that raised is replayed to see where
        result.error = error
    return result


def _backwards(passes: Sequence[Pass]) -> list[tuple[int, list[int]]]:
    """The backward passes in the order in which they ran, with the numbers of the passes that they went through."""
    members: dict[int, list[int]] = {}
    for number, each in enumerate(passes):
        for task in each.seeds:
            members.setdefault(task, []).append(number)
    return sorted(members.items())


def _backward(
    result: Replayed,
    passes: Sequence[Pass],
    members: Sequence[int],
    task: int,
    models: Mapping[str, nn.Module],
) -> None:
    """One backward pass through these passes; its gradients are added to the result's."""
    found: list[tuple[Tensor, Tensor]] = []
    for number in members:
        found += _independent(_roots(result.outputs[number], passes[number].seeds[task]))
    parameters = _trained(models[name] for name in {passes[number].model for number in members})
    if not found or not parameters:
        return
    targets, seeds = (list(each) for each in zip(*found, strict=True))
    try:
        gradients = list(
            torch.autograd.grad(targets, parameters, seeds, retain_graph=True, allow_unused=True)
        )
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        gradients = _by_backward(targets, seeds, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        result.add(parameter, gradient)


def _roots(outputs: Mapping[str, Tensor], handed: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that a backward pass began at, each with what it was handed.

    One tensor may stand at several places of an output; its gradient counts once.
    """
    roots = {leaf: outputs[leaf] for leaf in handed if leaf in outputs and outputs[leaf].requires_grad}
    return list({id(root): (root, handed[leaf]) for leaf, root in roots.items()}.values())


def _trained(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of some models that take gradients, each once."""
    parameters = [each for model in models for each in model.parameters()]
    return list({id(each): each for each in parameters if each.requires_grad and each.is_leaf}.values())


def _by_backward(roots: list[Tensor], seeds: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    """Reentrant checkpoints know no other way. A hook that would step an optimizer now must not be there."""
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
        raise RuntimeError(
            "the model has reentrant checkpoints and hooks on accumulated gradients: no replay of its backward"
        )
    torch.autograd.backward(roots, seeds)
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    return gradients


def _independent(found: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Without the outputs whose gradient came through another output alone, as logits' does through the loss.

    What an output was handed is the sum over everything that used it, so the part that the others account for is
    taken away again; there a last bit may differ, and the comparison of gradients tells.
    """
    if len(found) < 2:
        return found
    kept = []
    for position, (root, seed) in enumerate(found):
        others = [pair for number, pair in enumerate(found) if number != position]
        below = [pair for pair in others if _leads_to(pair[0], root)]
        if not below:
            kept.append((root, seed))
            continue
        targets, seeds = [pair[0] for pair in below], [pair[1] for pair in below]
        through = torch.autograd.grad(targets, [root], seeds, retain_graph=True)[0]
        if not torch.equal(through.nan_to_num(), seed.nan_to_num()):
            # Where the way through the others is not finite, nothing tells what came past it.
            kept.append((root, torch.where(through.isfinite(), seed - through, 0)))
    return kept


def _leads_to(result: Tensor, value: Tensor) -> bool:
    """Whether ``result`` was computed from ``value``."""
    wanted, waiting, seen = value.grad_fn, _above(result.grad_fn), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node is wanted:
            return True
        seen.add(node)
        waiting += _above(node)
    return False


def _above(node: Node | None) -> list[Node | None]:
    return [] if node is None else [each for each, _ in node.next_functions]
