"""Attention with no change in the model: the functions that compute it are wrapped in monitored steps.

``F.scaled_dot_product_attention`` and ``F.multi_head_attention_forward`` (which ``nn.MultiheadAttention`` calls)
are watched; a value belongs to the innermost module whose code made the call. It guarantees:
- the model's call goes through with the very arguments it came with;
- the wrappers are gone as soon as no monitor has a monitored step open, also when one was dropped in the middle of it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchtap._torch import in_backward
from torchtap.monitors.module_monitor.attention import monitor_heads

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["AttentionPatch"]

_lock = threading.RLock()  # a monitor may be collected while it is held
_open: tuple[weakref.ref[AttentionPatch], ...] = ()
_originals: dict[str, Callable[..., Any]] = {}
_wrappers: dict[str, Callable[..., Any]] = {}
_fast_path_was = True
_inside = threading.local()
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


@final
class AttentionPatch:
    """One monitor's interest in attention; ``where`` is True or a pattern for module names."""

    def __init__(self, monitor: ModuleMonitor, where: bool | str) -> None:
        self._monitor = monitor
        self._pattern = re.compile(".*" if isinstance(where, bool) else where)

    def set(self, on: bool) -> None:
        """A monitored step begins, or ends."""
        global _open
        with _lock:
            if on == any(each() is self for each in _open):
                return
            if on:
                if not _open:
                    _wrap()
                _open = (*_open, weakref.ref(self, _leave))
            else:
                _leave(next(each for each in _open if each() is self))

    def owner(self, frame: FrameType | None) -> tuple[str, bool] | None:
        """Name of the innermost module of this monitor that is running, and whether it is the reference's."""
        monitor = self._monitor
        while frame is not None:
            own = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(own, nn.Module):
                for names, is_reference in (
                    (monitor.module_names, False),
                    (monitor.reference_module_names, True),
                ):
                    if own in names:
                        return names[own], is_reference
            frame = frame.f_back
        return None

    def take(self, frame: FrameType | None, arguments: tuple[Any, ...], output: Tensor | None) -> None:
        """One attention was computed."""
        monitor = self._monitor
        if not monitor.current_step_monitored or in_backward():
            return
        found = self.owner(frame)
        if found is None or not self._pattern.match(found[0]):
            return
        name, is_reference = found
        if monitor._is_excluded(name) or not (monitor.is_monitoring() or is_reference):
            return
        query, key, value, mask, is_causal, scale = arguments
        monitor_heads(
            monitor,
            name,
            query,
            key,
            value,
            mask,
            is_causal=is_causal,
            scale=scale,
            activation=output,
            is_reference=is_reference,
        )


def _leave(patch: weakref.ref[AttentionPatch]) -> None:
    """A patch is not open any more; the last one takes the wrappers off."""
    global _open
    with _lock:
        was_open = bool(_open)
        _open = tuple(each for each in _open if each is not patch)
        if was_open and not _open:
            _unwrap()


def _wrap() -> None:
    global _fast_path_was
    # The fused inference path of nn.MultiheadAttention calls neither function.
    _fast_path_was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for name, parts_of in _PARTS.items():
        original = getattr(functional, name)
        _originals[name] = original
        _wrappers[name] = _wrapper(original, parts_of)
        setattr(functional, name, _wrappers[name])


def _unwrap() -> None:
    torch.backends.mha.set_fastpath_enabled(_fast_path_was)
    for name, wrapper in _wrappers.items():
        # Somebody who has wrapped ours meanwhile keeps it, and it does nothing any more.
        if getattr(functional, name) is wrapper:
            setattr(functional, name, _originals[name])
    _wrappers.clear()


def _wrapper(original: Callable[..., Any], parts_of: Callable[..., tuple[tuple[Any, ...], Any]]) -> Any:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "busy", False):  # multi-head attention may call the other one
            return original(*args, **kwargs)
        _inside.busy = True
        try:
            output = original(*args, **kwargs)
            with torch.no_grad():
                if _open:
                    arguments, by_head = parts_of(args, kwargs, output)
                for each in _open:
                    patch = each()
                    if patch is not None:
                        patch.take(sys._getframe(1), arguments, by_head)
            return output
        finally:
            _inside.busy = False

    return attention


def _of_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> tuple[tuple[Any, ...], Any]:
    given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
    parts = (
        given["query"].detach(),
        given["key"].detach(),
        given["value"].detach(),
        given.get("attn_mask"),
        given.get("is_causal", False),
        given.get("scale"),
    )
    return parts, output.detach()


def _of_multi_head(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Sequence first, and projections still to be done. What each head gives is inside: it is computed again."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    heads, width = given["num_heads"], given["embed_dim_to_check"]
    bias = given["in_proj_bias"]
    projected = []
    for index, name in enumerate(("query", "key", "value")):
        value = given[name].detach()
        value = value.unsqueeze(1) if value.dim() == 2 else value
        rows = slice(index * width, (index + 1) * width)
        weight = (
            given[f"{name[0]}_proj_weight"]
            if given["use_separate_proj_weight"]
            else given["in_proj_weight"][rows]
        )
        value = functional.linear(value, weight, None if bias is None else bias[rows])
        extra = given["bias_k" if name == "key" else "bias_v"] if name != "query" else None
        if extra is not None:
            value = torch.cat([value, extra.expand(1, value.shape[1], -1)])
        value = value.reshape(value.shape[0], value.shape[1], heads, -1).permute(1, 2, 0, 3)
        if given["add_zero_attn"] and name != "query":
            value = torch.cat([value, value.new_zeros(*value.shape[:2], 1, value.shape[3])], dim=2)
        projected.append(value)
    query, key, value = projected
    added = key.shape[2] - given["key"].shape[0]
    mask = _joined_mask(given["attn_mask"], given["key_padding_mask"], query, added)
    by_head = _originals["scaled_dot_product_attention"](query, key, value, attn_mask=mask)
    return (query, key, value, mask, False, None), by_head


def _joined_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, added: int) -> Tensor | None:
    """The two masks of multi-head attention, in which True hides, as one that is added."""
    joined: Tensor | None = None
    for each, is_padding in ((mask, False), (padding, True)):
        if each is None:
            continue
        added_mask = each.detach().to(query.dtype) if each.dtype != torch.bool else None
        if added_mask is None:
            added_mask = torch.zeros(each.shape, dtype=query.dtype, device=query.device)
            added_mask.masked_fill_(each, float("-inf"))
        added_mask = functional.pad(added_mask, (0, added))
        if is_padding:
            added_mask = added_mask.reshape(-1, added_mask.shape[-1])[:, None, None, :]
        elif added_mask.dim() == 3:
            added_mask = added_mask.reshape(query.shape[0], -1, *added_mask.shape[1:])
        joined = added_mask if joined is None else joined + added_mask
    return joined


_PARTS: dict[str, Callable[..., tuple[tuple[Any, ...], Any]]] = {
    "scaled_dot_product_attention": _of_sdpa,
    "multi_head_attention_forward": _of_multi_head,
}
