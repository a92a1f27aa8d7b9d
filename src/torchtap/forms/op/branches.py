"""Branches and loops that a compiler keeps as graphs of their own: ``torch.cond``, ``while_loop``, ``scan``.

AOT autograd does not carry an effect out of these graphs: with one inside, the compilation fails, or the value never
comes. So nothing is emitted there, and the coverage says why. Export takes effects along, and is not concerned.
"""

from __future__ import annotations

import torch

from torchtap._torch import graphs_being_traced
from torchtap.forms.op import op
from torchtap.plan.names import site_name
from torchtap.spi import reasons

__all__ = ["is_silent", "silences"]

_NO_EFFECTS = frozenset(("cond", "while_loop", "scan", "associative_scan", "map", "map_impl"))
_silent: set[str] = set()


def silences(address: str, kinds: tuple[str, ...]) -> bool:
    """Return True if the call that Dynamo is tracing is inside such a graph."""
    if torch.compiler.is_exporting() or _NO_EFFECTS.isdisjoint(graphs_being_traced()):
        return False
    for kind in kinds:
        _silent.add(site_name(address, kind))
        op.note(site_name(address, kind), reasons.IN_A_BRANCH)
    return True


def is_silent(site: str) -> bool:
    """Return True if a call of this site, with its channel, was ever traced inside such a graph."""
    return site in _silent
