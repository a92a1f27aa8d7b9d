"""Probe of the loss, read from autograd's graph at ``backward()``: classes, targets, probabilities, broadcasts.

A loss called by function, module or framework has a node in the graph. A loss that was compiled with the model is not
seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchtap._torch import saved_by, shape_from
from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.receive import backward
from torchtap.spi import Hooks


def is_next_token(tokens: Tensor, target: Tensor, ignored: int | None = -100) -> bool:
    """Return True if targets are the tokens that follow, whatever the layout: (batch, time) or (time, batch)."""
    return shift_of(tokens, target, ignored) == 1


def shift_of(tokens: Tensor, target: Tensor, ignored: int | None = -100) -> int | None:
    """Return by how many positions targets are ahead of the tokens: 0, 1 or 2; None if they are not the tokens."""
    if target.is_floating_point() or tokens.shape[0] * tokens.shape[1] < 8:
        return None
    tokens, flat = tokens.cpu(), target.detach().reshape(-1).cpu()  # read once: all layouts are tried here
    if len(torch.unique(tokens)) < 3:
        return None
    for ahead in (1, 0, 2):
        if any(_follow(tokens, flat, along, ahead, ignored) for along in (1, 0) if tokens.shape[along] > 3):
            return ahead
    return None


def _follow(tokens: Tensor, flat: Tensor, along: int, ahead: int, ignored: int | None) -> bool:
    """Return True if targets are the tokens ``ahead`` positions later along one dimension; the last may be missing."""
    inner = tokens.shape[along] - ahead
    following = tokens.narrow(along, ahead, inner)
    for length in dict.fromkeys((inner + ahead, inner + ahead - 1, inner)):
        shape = list(tokens.shape)
        shape[along] = length
        if length >= inner and flat.numel() == shape[0] * shape[1]:
            asked = flat.reshape(shape).narrow(along, 0, inner)
            counted = torch.ones_like(asked, dtype=torch.bool) if ignored is None else asked != ignored
            if bool(counted.any()) and bool((asked == following)[counted].float().mean() > 0.9):
                return True
    return False


def padding(tokens: Tensor) -> Tensor | None:
    """Where (batch, time) tokens are padding: the same token at the end of many rows, at least three times.

    The first of each such run may be an end of text and does not count. None where there is no padding to be seen.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 6 or tokens.shape[0] < 4:
        return None
    last = tokens[:, -1:]
    same = (tokens == last).flip(1).cumprod(1).flip(1).bool()  # the run that reaches the end of each row
    lengths = same.sum(1)
    long = lengths >= 3
    if float(long.float().mean()) < 0.25 or len(torch.unique(last[long])) != 1:
        return None
    if len(torch.unique(lengths[long])) < 2:
        return None  # padding comes in different lengths
    inner = same & torch.cat([torch.zeros_like(same[:, :1]), same[:, :-1]], 1)
    return inner & long[:, None]


_NODES = 40  # of a graph, from the loss on
_CHAIN = 8  # nodes between a loss and what was done to it
# These are never negative, whatever their arguments.
_NEVER_NEGATIVE = ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss")
_RANGES = (
    ("Relu", 0.0, float("inf")),
    ("Sigmoid", 0.0, 1.0),
    ("Tanh", -1.0, 1.0),
    ("Softplus", 0.0, float("inf")),
)
_SHAPES = ("View", "Squeeze", "Unsqueeze", "Reshape", "Select", "UnsafeView", "Transpose", "T")
_DIFFERENCES = ("Sub", "Rsub", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")


def nodes(first: Node | None) -> Iterator[Node]:
    """The nodes of a graph, those next to the loss first."""
    waiting, seen = deque([] if first is None else [first]), set[int]()
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting.extend(_before(node))


def _before(node: Node) -> list[Node]:
    return [each for each, _ in node.next_functions if each is not None]


def is_error(first: Node | None) -> bool:
    """Return True if a loss is one that cannot be negative, times factors: its sign is that of the factors."""
    node = first
    for _ in range(_CHAIN):
        if node is None:
            return False
        if node.name().startswith(_NEVER_NEGATIVE):
            return True
        below = _before(node)
        if len(below) != 1:
            return False
        node = below[0]
    return False


def reach_of(node: Node) -> tuple[str, float, float] | None:
    """Return the activation in front of a loss function and its range; None if there is none."""
    below = _before(node)
    for _ in range(4):
        if len(below) != 1:
            return None
        name = below[0].name()
        for activation, low, high in _RANGES:
            if name.startswith(activation):
                return activation.lower(), low, high
        if not name.startswith(_SHAPES):
            return None
        below = _before(below[0])
    return None


def softmax_below(node: Node) -> bool:
    """Return True if the log-softmax that a loss takes is of a softmax or a sigmoid."""
    below = _before(node)
    if len(below) != 1 or not below[0].name().startswith("LogSoftmax"):
        return False
    below = _before(below[0])
    for _ in range(4):
        if len(below) != 1:
            return False
        if below[0].name().startswith(("Softmax", "Sigmoid")):
            return True
        if not below[0].name().startswith(_SHAPES):
            return False
        below = _before(below[0])
    return False


def softmax_dimension(node: Node) -> int | None:
    """Of a node that takes log-probabilities of classes: the dimension that they were normalised over, from 0."""
    below = _before(node)
    if len(below) != 1 or not below[0].name().startswith("LogSoftmax"):
        return None
    dim, shape = saved_by(below[0], "dim"), shape_from(below[0])
    if dim is None or not shape:
        return None
    return int(dim - 2**64 if dim >= 2**63 else dim) % len(shape)


def broadcast(node: Node) -> tuple[int, ...] | None:
    """The shape of a difference between (n, 1) answers and (n) targets, or the other way round: n × n of them.

    The target is a constant; where both sides learn, all pairs may well be meant.
    """
    if not node.name().startswith(_DIFFERENCES):
        return None
    learning = _before(node)
    if len(learning) != 1 or len(node.next_functions) != 2:
        return None
    expanded = learning[0].name().startswith("Expand")
    answers = _before(learning[0]) if expanded else learning
    shape = shape_from(learning[0] if expanded else node)
    own = shape_from(answers[0]) if answers else None
    size = _side_of_square(shape)
    return shape if size > 1 and own in ((size, 1), (size,), (1, size)) else None


def _side_of_square(shape: tuple[int, ...] | None) -> int:
    """n of a shape (n, n), and zero of others."""
    return shape[0] if shape and shape == (shape[0], shape[0]) else 0


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
        self._hooks: list[Hooks] = []
        self._looks = 0
        self._binary = 0  # losses in a row that looked like probabilities
        self._negative = 0  # losses in a row that were made negative
        self._classes: list[int] | None = []  # of batches that had one class each; None once more had several
        self._mixed = 0  # batches that had several classes

    def start(self) -> None:
        backward.listen(self)
        for model in self._patient.called:
            if model.__dict__.get("_compiled_call_impl") is None:
                hooks = Hooks(model)
                hooks.before(model, partial(self._keep_tokens, None))
                self._hooks.append(hooks)

    def stop(self) -> None:
        backward.stop_listening(self)
        self._leave()

    def _leave(self) -> None:
        for hooks in self._hooks:
            hooks.remove()
        self._hooks, self._tokens = [], None

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
        elif name.startswith(_DIFFERENCES):
            self._look_at_range(node)
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
        self._look_at_shift(target, ignored)
        self._look_at_two(node)

    def _look_at_shift(self, target: Tensor, ignored: int | None) -> None:
        """Note by how many positions the targets are ahead of the tokens."""
        if self._tokens is None:
            return
        ahead = shift_of(self._tokens, target, ignored)
        if ahead == 1:
            self._tell.fact("next-token", ":input")
        elif ahead is not None:
            text = "the targets are the tokens " + ("themselves" if not ahead else "two positions ahead")
            self._tell.fact("targets-shifted", ":input", float(ahead), text)

    def _look_at_range(self, node: Node) -> None:
        """Note targets that the activation in front of the loss cannot give."""
        target, reach = saved_by(node, "target"), reach_of(node)
        if target is None or reach is None or not target.is_floating_point():
            return
        name, low, high = reach
        outside = float(((target < low - 1e-3) | (target > high + 1e-3)).float().mean())
        if outside > 0.05:
            ends = f"{float(target.min()):.3g} to {float(target.max()):.3g}"
            text = f"{outside:.0%} of the targets ({ends}) lie outside of what {name} gives"
            self._tell.fact("out-of-reach", _ANSWER, outside, text)

    def _look_at_two(self, node: Node) -> None:
        """Note a softmax right in front of the loss's own."""
        if softmax_below(node):
            text = "cross_entropy takes the softmax of a softmax"
            self._tell.fact("probabilities-as-logits", _ANSWER, text=text)

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
