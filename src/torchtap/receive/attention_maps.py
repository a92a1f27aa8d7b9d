"""The probabilities of an attention, computed from its arguments.

Fused kernels never form them, so they are computed a second time: without dropout, in pieces of a few heads. No random
number is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["additive", "attention_map", "attention_pieces", "with_batch"]

# Probabilities are formed for so many heads at a time that a piece stays about this large.
_PIECE_ELEMENTS = 1 << 24


def attention_pieces(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Iterator[Tensor]:
    """Softmax probabilities ``(batch, heads, queries, keys)``, a few heads at a time, in order.

    Key heads that serve several query heads (grouped-query attention) are matched up here.
    """
    with torch.no_grad():
        query, key = with_batch(query.detach()), with_batch(key.detach())
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        rows, columns = query.shape[-2], key.shape[-2]
        mask = _bias(attn_mask, is_causal, rows, columns, query)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        at_once = max(1, _PIECE_ELEMENTS // max(1, query.shape[0] * rows * columns))
        for start in range(0, heads, at_once):
            stop = min(heads, start + at_once)
            key_heads = torch.arange(start, stop, device=key.device) // group
            scores = (query[:, start:stop] * factor) @ key[:, key_heads].transpose(-2, -1)
            if mask is not None:
                scores = scores + (mask[..., start:stop, :, :] if mask.shape[-3] == heads > 1 else mask)
            # A row with every key masked has no distribution; fused kernels give zeros there.
            yield _distribution(scores) if mask is not None else torch.softmax(scores, -1)


def _distribution(scores: Tensor) -> Tensor:
    """Return the softmax of masked scores; zeros for a row that is masked throughout. A NaN stays a NaN."""
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)


def with_batch(value: Tensor) -> Tensor:
    """``(batch, heads, length, width)`` from fewer or more leading dimensions."""
    while value.dim() < 4:
        value = value.unsqueeze(0)
    return value.flatten(0, -4) if value.dim() > 4 else value


def _bias(mask: Tensor | None, is_causal: bool, rows: int, columns: int, like: Tensor) -> Tensor | None:
    """Any mask as an additive one of at least three dimensions."""
    if is_causal:
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril()
        causal = torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(
            ~allowed, -math.inf
        )
        return causal.unsqueeze(0) if mask is None else causal + additive(mask, like)
    return None if mask is None else additive(mask, like)


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask in which True means visible as numbers to add, with at least three dimensions."""
    mask = mask.detach()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -math.inf)
    while mask.dim() < 3:
        mask = mask.unsqueeze(0)
    return mask


def attention_map(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """All heads at once, in a form that a compiler can follow."""
    with torch.no_grad():
        query, key = with_batch(query.detach()), with_batch(key.detach())
        if query.shape[1] != key.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        bias = _bias(mask, is_causal, query.shape[-2], key.shape[-2], query)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if bias is None:
            return torch.softmax(scores, dim=-1)
        return _distribution(scores + bias)
