"""What autograd's graph says of a loss: its nodes, what they have kept, and shapes that should not meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch.autograd.graph import Node

from torchtap._torch import saved_by, shape_from

__all__ = ["broadcast", "is_error", "nodes", "softmax_dimension"]

_NODES = 40  # of a graph, from the loss on
_CHAIN = 8  # nodes between a loss and what was done to it
# These are never negative, whatever their arguments.
_NEVER_NEGATIVE = ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss")
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
    """Whether a loss is one that cannot be negative, times factors: its sign is that of the factors."""
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
