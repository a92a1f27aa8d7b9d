"""What a loss is made of, read from autograd's graph where ``backward()`` starts: classes, targets, probabilities.

However a loss was called, by function, module or framework, the graph has its node. A loss that was compiled with the
model is not seen.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchtap._torch import saved_by
from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.diagnosis.probes.loss_graph import broadcast, is_error, nodes, softmax_dimension
from torchtap.diagnosis.probes.pairs import is_next_token
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.walker import Walker
from torchtap.receive import backward

__all__ = ["LossProbe"]

_LOOKS = 6  # backwards that are looked at
_ALIKE = 6  # batches of one class each before this is told
_ANSWER = ":output"


@final
class LossProbe:
    """Looks at the first losses of a training. ``alone``: one model and one optimizer, so nobody plays against it."""

    def __init__(self, patient: Patient, tell: Telling, *, alone: bool) -> None:
        self._patient = patient
        self._tell = tell
        self._alone = alone
        self._tokens: Tensor | None = None  # the model's newest input of whole numbers
        self._walkers: list[Walker] = []
        self._looks = 0
        self._binary = 0  # losses in a row that looked like probabilities
        self._negative = 0  # losses in a row that were made negative
        self._classes: list[int] | None = []  # of batches that had one class each; None once more had several
        self._mixed = 0  # batches that had several classes

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

    def _keep_tokens(self, _: Any, args: Args, kwargs: Kwargs) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        whole = [each for each in given if not each.is_floating_point() and each.dim() == 2]
        self._tokens = whole[0] if whole else None

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        sorted_so_far = bool(self._classes)
        if root is None or not self._tell.live or (self._looks > _LOOKS and not sorted_so_far):
            return
        self._looks += 1
        if self._looks == _LOOKS + 1:
            self._leave()
        if self._looks > _LOOKS and not sorted_so_far:
            return
        try:
            with torch.no_grad():
                self._look_at_sign(loss, root)
                for node in nodes(root.grad_fn):
                    self._look(node)
        except RuntimeError:
            pass  # what a node has kept was freed or changed: nothing is known of this loss

    def backward_ends(self) -> None:
        pass

    def _look_at_sign(self, loss: Tensor | None, root: Tensor) -> None:
        if loss is None or not self._alone or self._looks > _LOOKS or not is_error(root.grad_fn):
            return
        self._tell.fact("error-is-loss", _ANSWER)
        self._negative = self._negative + 1 if float(loss) < 0 else 0
        if self._negative >= 2:
            text = "it is negative, which such a loss is only with its sign changed"
            self._tell.fact("loss-maximised", _ANSWER, float(loss), text)

    def _look(self, node: Node) -> None:
        name = node.name()
        if name.startswith("NllLoss"):
            self._look_at_classes(node)
        elif name.startswith("BinaryCrossEntropyWithLogits"):
            self._look_at_binary(saved_by(node, "self"))
        shape = broadcast(node)
        if shape is not None:
            text = f"{shape[0]} answers and {shape[1]} targets make {shape[0] * shape[1]} differences"
            self._tell.fact("loss-broadcasts", _ANSWER, float(shape[0]), text)

    def _look_at_classes(self, node: Node) -> None:
        given, target, ignored = (saved_by(node, name) for name in ("self", "target", "ignore_index"))
        if given is None or target is None or given.dim() < 2:
            return
        if given.shape[1] < 2:
            self._tell.fact("one-class", _ANSWER, float(given.shape[1]))
            return
        self._tell.fact("classes", _ANSWER, float(given.shape[1]))
        self._look_at_order(target)
        self._look_at_softmax(softmax_dimension(node), given)
        if self._tokens is not None and is_next_token(self._tokens, target, ignored):
            self._tell.fact("next-token", ":input")

    def _look_at_softmax(self, over: int | None, given: Tensor) -> None:
        """Whether numbers that should be log-probabilities of classes were made so, over the right dimension."""
        if over is None and bool((given >= 0).all() & (given <= 1).all() & (given > 0).any()):
            text = "nll_loss wants logarithms and is given numbers between 0 and 1"
            self._tell.fact("probabilities-as-logits", _ANSWER, text=text)
        elif over is not None and over != 1:
            text = f"log_softmax was taken over dimension {over}, and the classes are dimension 1"
            self._tell.fact("softmax-dimension", _ANSWER, float(over), text)

    def _look_at_order(self, target: Tensor) -> None:
        """Whether each batch has one class, and not all have the same."""
        if self._classes is None:
            return
        if target.numel() < 8 or bool((target != target.reshape(-1)[0]).any()):
            self._mixed += 1  # where one class ends and the next begins
        else:
            self._classes.append(int(target.reshape(-1)[0]))
        if 2 * self._mixed > len(self._classes):
            self._classes = None
            return
        different = len(set(self._classes))
        if len(self._classes) >= _ALIKE and different > 1:
            text = f"{different} classes came so far"
            self._tell.fact("sorted-classes", _ANSWER, float(different), text)
            self._classes = None

    def _look_at_binary(self, given: Tensor | None) -> None:
        if given is None:
            return
        inside = given.numel() >= 16 and bool((given >= 0).all() & (given <= 1).all())
        self._binary = self._binary + 1 if inside and bool((given < 1).any() & (given > 0).any()) else 0
        if self._binary >= 3:
            text = "binary_cross_entropy_with_logits is given numbers between 0 and 1"
            self._tell.fact("probabilities-as-logits", _ANSWER, text=text)
