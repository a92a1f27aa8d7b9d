"""What a loss is made of, read from autograd's graph where ``backward()`` starts: classes, targets, probabilities.

However a loss was called, by function, module or framework, the graph has its node. A loss that was compiled with the
model is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from torchtap._torch import saved_by
from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.diagnosis.probes.pairs import is_next_token
from torchtap.taps.receive import backward
from torchtap.taps.walk.walker import Walker

__all__ = ["LossProbe"]

_LOOKS = 6  # backwards that are looked at
_NODES = 40  # of a graph, from the loss on


@final
class LossProbe:
    """Looks at the first losses of a training."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._tokens: Tensor | None = None  # the model's newest input of whole numbers
        self._walkers: list[Walker] = []
        self._looks = 0
        self._binary = 0  # losses in a row that looked like probabilities

    def start(self) -> None:
        backward.listen(self)
        for model in self._patient.called:
            if model.__dict__.get("_compiled_call_impl") is None:
                walker = Walker(model)
                walker.before(model, None, self._keep_tokens, lambda *_: None)
                self._walkers.append(walker)

    def stop(self) -> None:
        backward.stop_listening(self)
        self._leave()

    def _leave(self) -> None:
        for walker in self._walkers:
            walker.leave()
        self._walkers, self._tokens = [], None

    def _keep_tokens(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        whole = [each for each in given if not each.is_floating_point() and each.dim() == 2]
        self._tokens = whole[0] if whole else None

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if root is None or self._looks > _LOOKS or not self._tell.live:
            return
        self._looks += 1
        if self._looks > _LOOKS:
            self._leave()
            return
        try:
            with torch.no_grad():
                for node in _nodes(root.grad_fn):
                    self._look(node)
        except RuntimeError:
            pass  # what a node has kept was freed or changed: nothing is known of this loss

    def backward_ends(self) -> None:
        pass

    def _look(self, node: Any) -> None:
        name = node.name()
        if name.startswith("NllLoss"):
            self._look_at_classes(node)
        elif name.startswith("BinaryCrossEntropyWithLogits"):
            self._look_at_binary(saved_by(node, "self"))

    def _look_at_classes(self, node: Any) -> None:
        given, target, ignored = (saved_by(node, name) for name in ("self", "target", "ignore_index"))
        if given is None or target is None or given.dim() < 2 or given.shape[1] < 2:
            return
        self._tell.fact("classes", ":output", float(given.shape[1]))
        below = [each for each, _ in node.next_functions if each is not None]
        logarithms = any(each.name().startswith("LogSoftmax") for each in below)
        if not logarithms and bool((given >= 0).all() & (given <= 1).all() & (given > 0).any()):
            text = "nll_loss wants logarithms and is given numbers between 0 and 1"
            self._tell.fact("probabilities-as-logits", ":output", text=text)
        if self._tokens is not None and is_next_token(self._tokens, target, ignored):
            self._tell.fact("next-token", ":input")

    def _look_at_binary(self, given: Tensor | None) -> None:
        if given is None:
            return
        inside = given.numel() >= 16 and bool((given >= 0).all() & (given <= 1).all())
        self._binary = self._binary + 1 if inside and bool((given < 1).any() & (given > 0).any()) else 0
        if self._binary >= 3:
            text = "binary_cross_entropy_with_logits is given numbers between 0 and 1"
            self._tell.fact("probabilities-as-logits", ":output", text=text)


def _nodes(first: Any) -> Iterator[Any]:
    """The nodes of a graph, those next to the loss first."""
    waiting, seen = deque([first]), set[int]()
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting.extend(each for each, _ in node.next_functions)
