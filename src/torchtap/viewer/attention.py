"""How spread attention is: the entropy of each head, step by step, in bits.

Zero: every row looks at one place. The logarithm of the number of places: it looks everywhere alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.store.read.results import TensorRef
from torchtap.viewer.downsample import buckets
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["entropy_of"]

_STEPS = 48
_VALUES = 1 << 22  # of one tensor


def entropy_of(shown: OpenRun, site: str) -> bytes:
    """Array ``entropy``: steps × heads, the mean over examples and rows of each row's entropy in bits."""
    with shown.lock:
        kept = {int(r.step): r for r in shown.run.tensors(site) if _is_map(r)}
        steps = [list(kept)[start] for start in buckets(len(kept), _STEPS)]
        if any(int(np.prod(kept[step].shape)) > _VALUES for step in steps):
            raise Refused("these attention maps are too large to summarise", 413)
        maps = [np.asarray(shown.tensor(site, step, "value"), dtype=np.float64) for step in steps]
        revision = shown.revision
    if not maps:
        raise Refused(f"no attention was recorded at {site!r}", 404)
    rows = [_entropy_by_head(weights) for weights in maps]
    heads = min(map(len, rows))
    facts = {"site": site, "heads": heads, "places": int(maps[-1].shape[-1]), "revision": revision}
    entropy = np.stack([row[:heads] for row in rows])
    return pack(facts, {"entropy": entropy, "steps": np.array(steps, dtype=np.float64)})


def _is_map(reference: TensorRef) -> bool:
    whole = reference.field == "value" and "histogram" not in str(reference.reduction)
    return whole and 2 <= len(reference.shape) <= 16


def _entropy_by_head(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    folded = weights.reshape(-1, *weights.shape[-3:]) if weights.ndim >= 3 else weights[None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.where(folded > 0, folded * np.log2(folded), 0.0).sum(axis=-1)
    bits[~np.isfinite(folded).all(axis=-1)] = np.nan
    found: npt.NDArray[np.float64] = bits.mean(axis=(0, 2))
    return found
