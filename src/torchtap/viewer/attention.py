"""How spread attention is: the entropy of each head, step by step, in bits.

Zero: every row looks at one place. The logarithm of the number of places: it looks everywhere alike.
"""

from __future__ import annotations

import numpy as np

from torchtap.viewer.downsample import buckets
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["entropy_of"]

_STEPS = 48
_VALUES = 1 << 22  # of one tensor


def entropy_of(shown: OpenRun, site: str) -> bytes:
    """Array ``entropy``: steps × heads, the mean over examples and rows of each row's entropy in bits."""
    with shown.lock:
        kept = {
            int(r.step): r
            for r in shown.run.tensors(site)
            if r.field == "value" and "histogram" not in str(r.reduction) and 2 <= len(r.shape) <= 16
        }
        steps = [list(kept)[start] for start in buckets(len(kept), _STEPS)]
        if any(int(np.prod(kept[step].shape)) > _VALUES for step in steps):
            raise Refused("these attention maps are too large to summarise", 413)
        maps = [np.asarray(shown.tensor(site, step, "value"), dtype=np.float64) for step in steps]
        revision = shown.revision
    if not maps:
        raise Refused(f"no attention was recorded at {site!r}", 404)
    heads = min(m.shape[-3] if m.ndim >= 3 else 1 for m in maps)
    rows = []
    for weights in maps:
        folded = weights.reshape(-1, *weights.shape[-3:]) if weights.ndim >= 3 else weights[None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = -np.where(folded > 0, folded * np.log2(folded), 0.0).sum(axis=-1)
        bits[~np.isfinite(folded).all(axis=-1)] = np.nan
        rows.append(bits.mean(axis=(0, 2))[:heads])
    facts = {"site": site, "heads": heads, "places": int(maps[-1].shape[-1]), "revision": revision}
    return pack(facts, {"entropy": np.stack(rows), "steps": np.array(steps, dtype=np.float64)})
