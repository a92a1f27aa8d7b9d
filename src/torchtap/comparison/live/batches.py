"""Several batches for one comparison: each is run and judged, and each site's floor is the largest of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from torchtap.comparison.align.rules import PairingRule
from torchtap.comparison.live.evidence import PassEvidence, gather
from torchtap.comparison.live.tracing import Feed
from torchtap.comparison.measure.floor import Floor
from torchtap.errors import CompareError

__all__ = ["as_batches", "gather_batches"]


def as_batches(inputs: object) -> list[object]:
    """A list is several batches; anything else is one."""
    if isinstance(inputs, list):
        if not inputs:
            raise CompareError(
                "inputs=[] has no batches; a list holds one entry for each, for example [(x,), (y,)]"
            )
        if not all(isinstance(each, (tuple, dict, Tensor)) or callable(each) for each in inputs):
            return [(inputs,)]  # a list of something else is the model's one argument
        return inputs
    return [inputs]


def gather_batches(
    reference: nn.Module,
    target: nn.Module,
    feeds: Sequence[tuple[Feed, Feed]],
    rules: tuple[str | PairingRule, ...],
    shadow: bool,
) -> list[PassEvidence]:
    """The evidence of each batch, with floors that hold for all of them."""
    found = [
        gather(reference, target, feed, rules=rules, forced=shadow, target_feed=theirs)
        for feed, theirs in feeds
    ]
    for which in ("free", "forced"):
        largest: dict[str, Floor] = {}
        for evidence in found:
            for site, floor in getattr(evidence.floors, which).items():
                largest[site] = _larger(largest.get(site), floor)
        for evidence in found:
            if evidence.floors.free:  # a batch that was identical learnt none and needs none
                setattr(evidence.floors, which, largest)
    return found


def _larger(known: Floor | None, floor: Floor) -> Floor:
    if known is None:
        return floor
    return replace(known, l2=max(known.l2, floor.l2), linf=max(known.linf, floor.linf))
