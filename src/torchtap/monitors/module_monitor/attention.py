"""The inside of attention: query, key, value and output head by head, and the entropy of each head's weights.

Fused kernels never form the weights, so they are computed again from the same arguments: one head and some rows
of queries at a time. A module's own code hands its attention over, or, with no change in the model, the core tells of
each attention in monitored steps (`AttentionPatch`): it belongs to the innermost module whose code made the call. It
guarantees:
- no random number is drawn: the entropy is that of the weights before dropout;
- no more than about `_PIECE_ELEMENTS` weights are in memory at once, whatever the length of the sequence;
- what a reference module computes never mixes with the monitored module's numbers;
- a monitor that is dropped in the middle of a step hears nothing more.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from torchtap.errors import MonitorError
from torchtap.receive.active import owner_of
from torchtap.receive.attention_calls import AttentionCall, listen

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["AttentionPatch", "head_entropy", "monitor_heads", "monitor_scaled_dot_product_attention"]

_PIECE_ELEMENTS = 1 << 22
_TINY = 1e-8  # keeps the logarithm of a weight of 0 finite


def monitor_scaled_dot_product_attention(
    monitor: ModuleMonitor,
    module: str | nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
    is_reference: bool = False,
) -> None:
    """Monitor one attention from inside a module's code; the arguments are those of the attention itself.

    Logs ``activation/{module}.head_{i}.query/…`` (``key``, ``value``, ``activation``) and
    ``attention_entropy/{module}.head_{i}``. Keys of another length than the queries are left to
    ``ModuleMonitor(attention=True)``: here they are warned about, and nothing is logged.
    """
    if not isinstance(module, str) and module in monitor.reference_module_names:
        is_reference = True  # a module knows itself, not which of the two models it belongs to
    if not monitor.is_monitoring() and not is_reference:
        return
    name = monitor._get_module_name(module, is_reference)
    if is_causal and attn_mask is not None:
        raise _ContradictionError(f"{name}: an attention is either causal or has a mask; both were given")
    if not _is_self_attention(query, key, value, enable_gqa):
        monitor.logger.warning(
            f"Step {monitor.current_step}: monitor_scaled_dot_product_attention assumes that S == L and that the "
            f"key query and value tensor have the same dimension; {name} has query {tuple(query.shape)}, "
            f"key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
        return
    monitor_heads(
        monitor,
        name,
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        activation=activation,
        is_reference=is_reference,
    )


class _ContradictionError(MonitorError, AssertionError):
    """Arguments that torch's own attention asserts not to get together."""


def _is_self_attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    same_heads = query.size(-3) == key.size(-3) or (enable_gqa and query.size(-3) % key.size(-3) == 0)
    return query.size(-2) == key.size(-2) and same_heads and query.size(-1) == value.size(-1)


def monitor_heads(
    monitor: ModuleMonitor,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    activation: Tensor | None = None,
    is_reference: bool = False,
) -> None:
    """Monitor every head of an attention, with any mask that broadcasts and any number of key heads."""
    heads = query.size(-3)
    for head in range(heads):
        shared = head * key.size(-3) // heads  # grouped queries: several heads look at the same keys
        parts = {
            "query": query[..., head, :, :],
            "key": key[..., shared, :, :],
            "value": value[..., shared, :, :],
        }
        if activation is not None:
            parts["activation"] = activation[..., head, :, :]
        for part, tensor in parts.items():
            monitor.monitor_activations(f"{name}.head_{head}.{part}", tensor.detach(), is_reference)
        if is_reference:
            continue  # there is one entropy for each key, and it is the monitored module's
        entropy = head_entropy(query, key, head, mask, is_causal=is_causal, scale=scale)
        monitor._log_own(f"attention_entropy/{name}.head_{head}", entropy)


@torch.no_grad()
def head_entropy(
    query: Tensor,
    key: Tensor,
    head: int,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``-sum w log w`` over the keys, for each query of one head. A query that may see no key has 0."""
    queries = query[..., head, :, :].detach()
    keys = key[..., head * key.size(-3) // query.size(-3), :, :].detach()
    keys = keys.to(queries.dtype).transpose(-2, -1)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    own_mask = _of_head(mask, head, query.size(-3))
    pieces = []
    for start, stop in _row_pieces(queries, keys.size(-1)):
        scores = queries[..., start:stop, :] @ keys * factor
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if is_causal:
            allowed = torch.arange(keys.size(-1), device=scores.device) <= torch.arange(
                start, stop, device=scores.device
            ).unsqueeze(-1)
            scores.masked_fill_(~allowed, -math.inf)
        if own_mask is not None:
            rows = own_mask if own_mask.size(-2) == 1 else own_mask[..., start:stop, :]
            if rows.dtype == torch.bool:
                scores = scores.masked_fill(~rows, -math.inf)
            else:
                scores = scores + rows
        weights = torch.softmax(scores, dim=-1)
        if own_mask is not None:
            weights = weights.nan_to_num_(0.0)
        pieces.append((weights + _TINY).log_().mul_(weights).sum(dim=-1).neg_())
    return torch.cat(pieces, dim=-1)


def _row_pieces(queries: Tensor, columns: int) -> Iterator[tuple[int, int]]:
    rows = queries.size(-2)
    batch = max(1, queries.numel() // max(1, rows * queries.size(-1)))
    at_once = max(1, _PIECE_ELEMENTS // max(1, batch * columns))
    for start in range(0, rows, at_once):
        yield start, min(rows, start + at_once)


def _of_head(mask: Tensor | None, head: int, heads: int) -> Tensor | None:
    """The part of a mask that is about one head, with at least two dimensions."""
    if mask is None:
        return None
    mask = mask.detach()
    while mask.dim() < 2:
        mask = mask.unsqueeze(0)
    if mask.dim() < 3:
        return mask
    return mask[..., head if mask.size(-3) == heads else 0, :, :]


@final
class AttentionPatch:
    """One monitor's interest in attention; ``where`` is True or a pattern for module names."""

    def __init__(self, monitor: ModuleMonitor, where: bool | str) -> None:
        self._monitor = weakref.proxy(monitor)
        self._pattern = re.compile(".*" if isinstance(where, bool) else where)
        self._stop: weakref.finalize[[], AttentionPatch] | None = None

    def set(self, on: bool) -> None:
        """A monitored step begins, or ends."""
        if on and self._stop is None:
            listening = listen(partial(_tell, weakref.ref(self)))
            self._stop = weakref.finalize(self, listening.remove)
        elif not on and self._stop is not None:
            self._stop()
            self._stop = None

    def _name_of(self, module: nn.Module) -> tuple[str, bool] | None:
        """Name of a module of this monitor, and whether it is the reference's."""
        monitor = self._monitor
        if module in monitor.module_names:
            return monitor.module_names[module], False
        if module in monitor.reference_module_names:
            return monitor.reference_module_names[module], True
        return None

    def take(self, call: AttentionCall) -> None:
        """One attention was computed."""
        monitor = self._monitor
        if not monitor.current_step_monitored:
            return
        found = owner_of(call.frame, self._name_of)
        if found is None or not self._pattern.match(found[0]):
            return
        name, is_reference = found
        if monitor._is_excluded(name) or not (monitor.is_monitoring() or is_reference):
            return
        if call.arguments is None:
            monitor.logger.warning(
                "Step %s: nested tensors in the attention of %s", monitor.current_step, name
            )
            return
        query, key, mask, is_causal, scale = call.arguments
        monitor_heads(
            monitor,
            name,
            query,
            key,
            call.value,
            mask,
            is_causal=is_causal,
            scale=scale,
            activation=call.by_head(),
            is_reference=is_reference,
        )


def _tell(patch: weakref.ref[AttentionPatch], call: AttentionCall) -> None:
    listening = patch()
    if listening is not None:
        listening.take(call)
