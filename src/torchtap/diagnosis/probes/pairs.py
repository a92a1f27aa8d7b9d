"""Inputs against targets: whether a model is asked for the next token, and which positions are padding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_next_token", "padding"]


def is_next_token(tokens: Tensor, target: Tensor, ignored: int | None = -100) -> bool:
    """Whether targets are the tokens that follow, whatever the layout: (batch, time) or (time, batch)."""
    if target.is_floating_point() or tokens.shape[0] * tokens.shape[1] < 8 or len(torch.unique(tokens)) < 3:
        return False
    flat = target.detach().reshape(-1)
    return any(_follow(tokens, flat, along, ignored) for along in (1, 0) if tokens.shape[along] > 1)


def _follow(tokens: Tensor, flat: Tensor, along: int, ignored: int | None) -> bool:
    """Whether targets are the tokens that follow along one dimension; the last position may have no target."""
    inner = tokens.shape[along] - 1
    following = tokens.narrow(along, 1, inner)
    for length in (inner + 1, inner):
        shape = list(tokens.shape)
        shape[along] = length
        if flat.numel() == shape[0] * shape[1]:
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
