"""From a hook to the op: which tensors of a call are handed over, and under which names.

Dynamo follows a hook step by step, once for each module, and guards every attribute that it meets. So whatever depends
on names alone is worked out by one function that it runs instead of following it, on an object that it guards as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torchtap._torch import is_traced_by_fx, mark_constant
from torchtap.forms.op.branches import silences
from torchtap.forms.op.channel import CALL, SAME_CALL, Emitted
from torchtap.forms.op.fused import emit_measured, is_fused, may_fuse
from torchtap.plan.names import site_name
from torchtap.spi import leaves

__all__ = ["emit_leaves"]


def emit_leaves(what: Emitted, found: Iterable[tuple[str, Tensor]], near: object = None) -> None:
    """Hand the tensors of one call to the op, under their leaves' names.

    A call without one is counted. ``near`` has arguments of the call: FX puts nothing into a graph without a proxy.
    """
    first = True
    for leaf, tensor in found:
        traced_on = tensor.device.type if is_dynamo_compiling() else ""
        for way, site in _sites(what, leaf, traced_on, CALL if first else SAME_CALL):
            if way == "gradient":
                torch.ops.torchtap.emit_grad.default(tensor, site)
            elif way == "statistics" and is_fused(tensor):
                emit_measured(tensor, site)
            else:
                torch.ops.torchtap.emit.default(tensor, site)
        first = False
    if first:
        proxy = None if is_dynamo_compiling() or not is_traced_by_fx() else next(leaves(near), ("", None))[1]
        for _, site in _sites(what, "", "cpu" if is_dynamo_compiling() else "", CALL):
            torch.ops.torchtap.call.default(site, proxy)


def _sites(what: Emitted, leaf: str, traced_on: str, mark: str) -> tuple[tuple[str, str], ...]:
    """For each kind in which way a tensor is emitted, and as which site; ``traced_on`` is its device if Dynamo asks."""
    if traced_on and silences(what.address, what.kinds):
        return ()
    measured = what.measured if traced_on and may_fuse(traced_on) else ()
    return tuple(
        _way(kind, site_name(what.address, f"{mark}{kind}", leaf), kind in measured) for kind in what.kinds
    )


mark_constant(_sites)


def _way(kind: str, site: str, measured: bool) -> tuple[str, str]:
    if not kind.startswith("grad"):
        return "statistics" if measured else "value", site
    # The backward graph is traced later, and has nothing but the name: a mark in it asks for statistics only.
    return "gradient", site.replace("|", "!|", 1) if measured else site
