"""Attention maps with no change in the model: the functions that fuse attention are wrapped while a tap is live.

Fused kernels never form the probabilities, so they are computed a second time from the same arguments: without
dropout, in pieces of a few heads, and only on live steps. Four entry points cover what torch offers:
``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward`` (``nn.MultiheadAttention``), and the two
inference fast paths. It guarantees:
- the model's own call goes through with the very arguments it came with, and no random number is drawn;
- the wrappers are gone as soon as no session has a live attention tap.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from torchtap._torch import in_backward
from torchtap.names import site_name
from torchtap.taps.receive import inside, reasons
from torchtap.taps.receive.active import calling_module, listening
from torchtap.taps.receive.receiver import Receiver

__all__ = ["attention_pieces", "patch"]

# Probabilities are formed for so many heads at a time that a piece stays about this large.
_PIECE_ELEMENTS = 1 << 24

_lock = threading.Lock()
_users = 0
_originals: dict[tuple[Any, str], Any] = {}
_inside = threading.local()


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
        query, key = _with_batch(query.detach()), _with_batch(key.detach())
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
            yield (
                torch.softmax(scores, dim=-1).nan_to_num_(0.0)
                if mask is not None
                else torch.softmax(scores, -1)
            )


def _with_batch(value: Tensor) -> Tensor:
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
        return causal.unsqueeze(0) if mask is None else causal + (_additive(mask, like))
    return None if mask is None else _additive(mask, like)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    mask = mask.detach()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -math.inf)
    while mask.dim() < 3:
        mask = mask.unsqueeze(0)
    return mask


# -- what each entry point was given, as (query, key, mask, is_causal, scale) by head ----------------------


def _of_scaled_dot_product(bound: dict[str, Any]) -> tuple[Any, ...]:
    return bound["query"], bound["key"], bound["attn_mask"], bound["is_causal"], bound["scale"]


def _of_multi_head(bound: dict[str, Any]) -> tuple[Any, ...]:
    """``F.multi_head_attention_forward``: sequence first, projections still to be done."""
    query, key = bound["query"].detach(), bound["key"].detach()
    if query.dim() == 2:  # no batch
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    width, heads = bound["embed_dim_to_check"], bound["num_heads"]
    bias = bound["in_proj_bias"]
    if bound["use_separate_proj_weight"]:
        query_weight, key_weight = bound["q_proj_weight"], bound["k_proj_weight"]
    else:
        query_weight, key_weight = bound["in_proj_weight"][:width], bound["in_proj_weight"][width : 2 * width]
    query = functional.linear(query, query_weight, None if bias is None else bias[:width])
    key = functional.linear(key, key_weight, None if bias is None else bias[width : 2 * width])
    columns = key.shape[0]
    if bound["bias_k"] is not None:
        key = torch.cat([key, bound["bias_k"].expand(1, key.shape[1], -1)])
    if bound["static_k"] is not None:
        by_head = bound["static_k"].reshape(query.shape[1], heads, -1, width // heads)
    else:
        by_head = key.reshape(key.shape[0], key.shape[1], heads, -1).permute(1, 2, 0, 3)
    if bound["add_zero_attn"]:
        by_head = torch.cat([by_head, by_head.new_zeros(*by_head.shape[:2], 1, by_head.shape[3])], dim=2)
    queries = query.reshape(query.shape[0], query.shape[1], heads, -1).permute(1, 2, 0, 3)
    added = by_head.shape[2] - columns
    mask = _joined_mask(bound["attn_mask"], bound["key_padding_mask"], queries, added)
    return queries, by_head, mask, False, None


def _joined_mask(mask: Tensor | None, padding: Tensor | None, queries: Tensor, added: int) -> Tensor | None:
    """MultiheadAttention's masks, in which True means hidden, as one additive mask over batch and heads."""
    batch, heads = queries.shape[:2]
    joined: Tensor | None = None
    if mask is not None:
        joined = _additive(~mask if mask.dtype == torch.bool else mask, queries)
        if joined.shape[0] == batch * heads:
            joined = joined.reshape(batch, heads, *joined.shape[1:])
        joined = functional.pad(joined, (0, added))
    if padding is not None:
        hidden = padding if padding.dim() == 2 else padding.unsqueeze(0)
        hidden = _additive(~hidden if hidden.dtype == torch.bool else hidden, queries)[0]
        hidden = functional.pad(hidden, (0, added))[:, None, None, :]
        joined = hidden if joined is None else joined + hidden
    return joined


def _of_native(bound: dict[str, Any]) -> tuple[Any, ...] | None:
    """Torch's own whole multi-head attention: batch first, one packed projection."""
    query, key = bound["query"].detach(), bound["key"].detach()
    if query.is_nested or key.is_nested:
        return None
    return _packed(
        query,
        key,
        bound["embed_dim"],
        bound["num_head"],
        bound["qkv_weight"],
        bound["qkv_bias"],
        bound["mask"],
    )


def _of_encoder_layer(bound: dict[str, Any]) -> tuple[Any, ...] | None:
    """Torch's own whole encoder layer: a whole layer in one call; its norm may come first."""
    source = bound["src"].detach()
    if source.is_nested:
        return None
    width = bound["embed_dim"]
    if bound["norm_first"]:
        source = functional.layer_norm(
            source, (width,), bound["norm_weight_1"], bound["norm_bias_1"], bound["eps"]
        )
    return _packed(
        source, source, width, bound["num_heads"], bound["qkv_weight"], bound["qkv_bias"], bound["mask"]
    )


def _packed(
    query: Tensor, key: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Any, ...]:
    query = functional.linear(query, weight[:width], bias[:width])
    key = functional.linear(key, weight[width : 2 * width], bias[width : 2 * width])
    queries = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    keys = key.unflatten(-1, (heads, -1)).transpose(1, 2)
    if mask is not None:
        hidden = mask.bool()
        if (
            hidden.dim() == 2
            and hidden.shape == (query.shape[0], key.shape[1])
            and query.shape[0] != query.shape[1]
        ):
            hidden = hidden[:, None, None, :]
        mask = _additive(~hidden, queries)
    return queries, keys, mask, False, None


_NATIVE_NAMES = [
    "query",
    "key",
    "value",
    "embed_dim",
    "num_head",
    "qkv_weight",
    "qkv_bias",
    "proj_weight",
    "proj_bias",
    "mask",
    "need_weights",
    "average_attn_weights",
    "mask_type",
]
_ENCODER_NAMES = [
    "src",
    "embed_dim",
    "num_heads",
    "qkv_weight",
    "qkv_bias",
    "proj_weight",
    "proj_bias",
    "use_gelu",
    "norm_first",
    "eps",
    "norm_weight_1",
    "norm_bias_1",
    "norm_weight_2",
    "norm_bias_2",
    "ffn_weight_1",
    "ffn_bias_1",
    "ffn_weight_2",
    "ffn_bias_2",
    "mask",
    "mask_type",
]
_SDPA_NAMES = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
_SDPA_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def _binder(names: list[str], defaults: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Builtins have no signature that Python can read, so theirs is written down here."""

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict.fromkeys(names), **defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind


def _multi_head_binder() -> Callable[..., dict[str, Any]]:
    signature = inspect.signature(functional.multi_head_attention_forward)
    defaults = {p.name: None if p.default is p.empty else p.default for p in signature.parameters.values()}
    return _binder(list(defaults), defaults)


def _entry_points() -> list[tuple[Any, str, Callable[..., dict[str, Any]], Callable[..., Any]]]:
    return [
        (
            functional,
            "scaled_dot_product_attention",
            _binder(_SDPA_NAMES, _SDPA_DEFAULTS),
            _of_scaled_dot_product,
        ),
        (functional, "multi_head_attention_forward", _multi_head_binder(), _of_multi_head),
        (torch, "_native_multi_head_attention", _binder(_NATIVE_NAMES, {}), _of_native),
        (torch, "_transformer_encoder_layer_fwd", _binder(_ENCODER_NAMES, {}), _of_encoder_layer),
    ]


# -- the wrappers --------------------------------------------------------------------------------------------


def _wrapper(original: Any, bind: Callable[..., dict[str, Any]], arguments_of: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(original, args, kwargs, bind, arguments_of)
        if getattr(_inside, "busy", False):  # one entry point calls another: the outer one has seen to it
            return original(*args, **kwargs)
        _inside.busy = True
        try:
            for receiver in listening():
                if receiver.listens_to("attention"):
                    _report(receiver, bind(args, kwargs), arguments_of)
            return original(*args, **kwargs)
        finally:
            _inside.busy = False

    return attention


def _traced(
    original: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bind: Callable[..., dict[str, Any]],
    arguments_of: Callable[..., Any],
) -> Any:
    """The same for Dynamo, which follows: the map becomes a part of the graph and leaves through the op."""
    if not inside.paths or inside.busy:
        return original(*args, **kwargs)
    inside.busy.append(True)
    with torch.no_grad():
        arguments = arguments_of(bind(args, kwargs))
    if arguments is not None:
        torch.ops.torchtap.emit.default(_whole_map(*arguments), site_name(inside.paths[-1], "attention"))
    result = original(*args, **kwargs)
    inside.busy.pop()
    return result


def _whole_map(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    with torch.no_grad():
        query, key = _with_batch(query.detach()), _with_batch(key.detach())
        if query.shape[1] != key.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        bias = _bias(mask, is_causal, query.shape[-2], key.shape[-2], query)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        if bias is None:
            return torch.softmax(scores, dim=-1)
        return torch.softmax(scores + bias, dim=-1).nan_to_num(0.0)


def _report(receiver: Receiver, bound: dict[str, Any], arguments_of: Callable[..., Any]) -> None:
    if in_backward():  # a checkpoint's repetition
        return
    ports = receiver.enclosing("attention", calling_module(receiver, 3) or "")
    if not ports:
        return
    with torch.no_grad():
        arguments = arguments_of(bound)
    if arguments is None:
        for port in ports:
            port.note = reasons.NESTED_ATTENTION
        return
    query, key = _with_batch(arguments[0]), arguments[1]
    shape = (*query.shape[:3], key.shape[-2])
    for port in ports:
        receiver.take_pieces(port, "", shape, lambda: attention_pieces(*arguments))


@final
class _Patch:
    """One user of the wrappers; the last to leave takes them off."""

    def __init__(self) -> None:
        self._on = True

    def remove(self) -> None:
        global _users
        with _lock:
            if not self._on:
                return
            self._on = False
            _users -= 1
            if _users == 0:
                for (owner, name), original in _originals.items():
                    setattr(owner, name, original)
                _originals.clear()


def patch() -> _Patch:
    """Wrap the entry points until `remove` is called."""
    global _users
    with _lock:
        if _users == 0:
            for owner, name, bind, arguments_of in _entry_points():
                original = getattr(owner, name)
                _originals[owner, name] = original
                setattr(owner, name, _wrapper(original, bind, arguments_of))
        _users += 1
    return _Patch()
