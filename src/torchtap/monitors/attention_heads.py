"""Heads of attention: query, key, value, output, and the entropy of the weights, head by head.

Fused kernels never form the weights, so they are computed again from the same arguments: one head and some rows of
queries at a time. A module's code passes its attention on with `monitor_scaled_dot_product_attention`. With
``ModuleMonitor(attention=True)`` no change is needed: `AttentionPatch` receives every attention of a monitored step,
which belongs to the innermost module whose code made the call. Guarantees:
- no random number is drawn: the entropy is that of the weights before dropout;
- at most about `_PIECE_ELEMENTS` weights are in memory at once, for any length of the sequence;
- values of a reference never mix with the monitored module's numbers;
- a monitor that is dropped in the middle of a step receives nothing more.
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
from torchtap.receive.attention import AttentionCall, listen
from torchtap.receive.by_name import owner_of

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor import ModuleMonitor

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
    """Monitor one attention from inside a module's code. The arguments are those of the attention itself.

        if self.is_monitoring:
            monitor_scaled_dot_product_attention(self.get_module_monitor(), self, q, k, v, activation=y)

    Logs ``activation/{module}.head_{i}.query/…`` (``key``, ``value``, ``activation``) and
    ``attention_entropy/{module}.head_{i}``. If keys and queries differ in length, it logs a warning and nothing else;
    ``ModuleMonitor(attention=True)`` handles them. Raises `MonitorError` for a mask together with ``is_causal``.
    """
    if not isinstance(module, str) and module in monitor.reference_module_names:
        is_reference = True  # a module does not know which of the two models it belongs to
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
    """Two arguments that torch's attention refuses with an assertion."""


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
        shared = head * key.size(-3) // heads  # grouped queries: several heads share the same keys
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
            continue  # an entropy's key belongs to the monitored module
        if monitor.is_monitoring():
            entropy = head_entropy(query, key, head, mask, is_causal=is_causal, scale=scale)
            step = monitor.current_step
            monitor.storage.log_tensor(step, f"attention_entropy/{name}.head_{head}", entropy)  # type: ignore[arg-type]


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
    """Return ``-sum w log w`` over the keys, for each query of one head. It is 0 for a query that may see no key."""
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
    """Return one head's part of a mask, with at least two dimensions."""
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
    """Pass each attention of a monitored step on to a monitor. ``where`` is True or a pattern for module names."""

    def __init__(self, monitor: ModuleMonitor, where: bool | str) -> None:
        self._monitor = weakref.proxy(monitor)
        self._pattern = re.compile(".*" if isinstance(where, bool) else where)
        self._stop: weakref.finalize[[], AttentionPatch] | None = None

    def set(self, on: bool) -> None:
        """Receive attention calls from now on, or stop doing so."""
        if on and self._stop is None:
            registered = listen(partial(_pass_on, weakref.ref(self)))
            self._stop = weakref.finalize(self, registered.remove)
        elif not on and self._stop is not None:
            self._stop()
            self._stop = None

    def _name_of(self, module: nn.Module) -> tuple[str, bool] | None:
        """Return the name of a module of this monitor, and True if it is the reference's."""
        monitor = self._monitor
        if module in monitor.module_names:
            return monitor.module_names[module], False
        if module in monitor.reference_module_names:
            return monitor.reference_module_names[module], True
        return None

    def take(self, call: AttentionCall) -> None:
        """Monitor one attention."""
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


def _pass_on(patch: weakref.ref[AttentionPatch], call: AttentionCall) -> None:
    alive = patch()
    if alive is not None:
        alive.take(call)
