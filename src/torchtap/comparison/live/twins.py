"""The same two models in float32: what 16 bits are too coarse to decide is decided there.

In 16 bits a difference that is undone further on and one that is real but small look alike: half of it drowns in
rounding. In float32 the same arithmetic has room to tell them apart.
"""

from __future__ import annotations

import copy

from torch import Tensor

from torchtap.comparison.live.evidence import PassEvidence, gather
from torchtap.comparison.live.tracing import Feed
from torchtap.comparison.measure.dtypes import resolution
from torchtap.hooks.structure import map_leaves

__all__ = ["in_float32"]

_NARROW = 1e-4  # from this resolution on a dtype has 16 bits or fewer


def in_float32(found: PassEvidence) -> PassEvidence | None:
    """What both models show in float32; ``None`` when they are not in 16 bits, or do not run so."""
    dtypes = [value.dtype for value in found.trace.values.values() if value.is_floating_point()]
    narrow = sum(resolution(dtype) > _NARROW for dtype in dtypes)
    if 2 * narrow < len(dtypes):
        return None
    try:
        reference, target = copy.deepcopy(found.reference).float(), copy.deepcopy(found.target).float()
        return gather(reference, target, _wide(found.feed), target_feed=_wide(found.target_feed))
    except Exception:  # a forward that insists on its dtype leaves the question open
        return None


def _wide(feed: Feed) -> Feed:
    """The same inputs, their numbers in float32."""

    def widened(_: str, value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    return lambda model: feed(
        lambda *args, **kwargs: model(*map_leaves(args, widened), **map_leaves(kwargs, widened))
    )
