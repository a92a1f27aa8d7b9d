"""How a culprit's own value follows from what the reference has: an exact relation in words, or none."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from torchtap.comparison.live.evidence import PassEvidence
from torchtap.comparison.live.parameters import own_tensors
from torchtap.comparison.measure.patterns import pattern
from torchtap.comparison.measure.terms import differing_term, hidden_only
from torchtap.plan.names import join_path, parent_path, read_name

__all__ = ["relation"]


def relation(found: PassEvidence, site: str) -> str:
    """The relation of the target's own value at a site, made of the reference's inputs, to the reference's value."""
    own = found.replaced.get(site)
    if own is None:
        return ""
    reference = found.trace.values[site]
    if own.numel() != reference.numel():
        return ""
    own = own.reshape(reference.shape)
    author = next(event.author for event in found.trace.events if event.site == site)
    return (
        pattern(reference, own)
        or differing_term(reference, own, _terms(found, author or "", site))
        or hidden_only(reference, own, _masks(found))
    )


def _terms(found: PassEvidence, author: str, site: str) -> Iterator[tuple[str, Tensor]]:
    """What a module's own code adds up: its parameters, what it was given, what its children returned."""
    try:
        for name, value in own_tensors(found.reference, author).items():
            yield join_path(author, name), value
    except AttributeError:  # a module of another name in the reference
        pass
    for event in found.trace.events:
        given = event.kind == "input" and event.module == author
        made = event.kind == "output" and event.module != "" and parent_path(event.module) == author
        if (given or made) and event.site != site:
            yield event.site, found.trace.values[event.site]


def _masks(found: PassEvidence) -> Iterator[tuple[str, Tensor]]:
    for event in found.trace.events:
        value = found.trace.values[event.site]
        if event.module == "" and event.kind == "input" and not value.is_floating_point():
            yield read_name(event.site).leaf, value
