"""The functions in which torch computes attention, wrapped for as long as anybody listens.

Four entry points cover what torch offers: ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``
(``nn.MultiheadAttention``), and the two inference fast paths. It guarantees:
- the model's own call goes through with the arguments it came with;
- the wrappers are gone as soon as nobody listens;
- an attention that one entry point hands to another is told once, and a checkpoint's repetition is not told.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from torchtap._torch import in_backward
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.names import site_name
from torchtap.receive import inside
from torchtap.receive.attention_maps import additive, attention_map

__all__ = ["AttentionCall", "Listener", "listen"]

Bound: TypeAlias = dict[str, Any]  # an entry point's arguments by name
# Query and key by head, the mask, whether it is causal, and the scale.
Arguments: TypeAlias = tuple[Tensor, Tensor, Tensor | None, bool, float | None]
Part: TypeAlias = Callable[[Bound], Tensor]


class _EntryPoint(NamedTuple):
    """A function that computes attention, and how to read its arguments."""

    owner: Any
    name: str
    bind: Callable[[Args, Kwargs], Bound]
    arguments: Callable[[Bound], Arguments | None]
    value: Part
    gives_heads: bool = False  # whether its result is that of each head


@final
class AttentionCall:
    """One attention that was computed. What nobody asks for is not worked out."""

    def __init__(self, entry: _EntryPoint, bound: Bound, result: Any, frame: FrameType | None) -> None:
        self._entry = entry
        self._bound = bound
        self._result = result
        self.frame = frame  # of the code that asked for it

    @cached_property
    def arguments(self) -> Arguments | None:
        """What it was given; None where the heads cannot be told apart (nested tensors)."""
        with torch.no_grad():
            return self._entry.arguments(self._bound)

    @cached_property
    def value(self) -> Tensor:
        """The values by head."""
        with torch.no_grad():
            return self._entry.value(self._bound)

    def by_head(self) -> Tensor:
        """What each head gives. Where it stays inside the entry point, it is computed again, without dropout."""
        if self._entry.gives_heads:
            result: Tensor = self._result.detach()
            return result
        assert self.arguments is not None
        query, key, mask, is_causal, scale = self.arguments
        with torch.no_grad():
            return functional.scaled_dot_product_attention(
                query, key, self.value, attn_mask=mask, is_causal=is_causal, scale=scale
            )


Listener: TypeAlias = Callable[[AttentionCall], None]

_lock = threading.RLock()  # a listener may be collected while it is held
_listeners: tuple[Listener, ...] = ()
_wrapped: list[tuple[_EntryPoint, Any, Any]] = []  # with the original and the wrapper
_inside = threading.local()


@final
class _Listening:
    """One listener; the last to leave takes the wrappers off."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def remove(self) -> None:
        """Hear nothing more; a second time does nothing."""
        global _listeners
        with _lock:
            had = bool(_listeners)
            _listeners = tuple(each for each in _listeners if each is not self._listener)
            if had and not _listeners:
                _unwrap()


def listen(listener: Listener) -> _Listening:
    """Have every attention told that any thread computes, until `remove` is called."""
    global _listeners
    with _lock:
        if not _listeners:
            _wrap()
        _listeners = (*_listeners, listener)
    return _Listening(listener)


def _wrap() -> None:
    for entry in _entry_points():
        original = getattr(entry.owner, entry.name)
        wrapper = _wrapper(original, entry)
        setattr(entry.owner, entry.name, wrapper)
        _wrapped.append((entry, original, wrapper))


def _unwrap() -> None:
    for entry, original, wrapper in _wrapped:
        # Somebody who has wrapped ours meanwhile keeps it, and it does nothing any more.
        if getattr(entry.owner, entry.name) is wrapper:
            setattr(entry.owner, entry.name, original)
    _wrapped.clear()


def _wrapper(original: Any, entry: _EntryPoint) -> Any:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(original, args, kwargs, entry.bind, entry.arguments)
        if getattr(_inside, "busy", False):  # one entry point calls another: the outer one sees to it
            return original(*args, **kwargs)
        _inside.busy = True
        try:
            result = original(*args, **kwargs)
            if _listeners and not in_backward():
                call = AttentionCall(entry, entry.bind(args, kwargs), result, sys._getframe(1))
                for listener in _listeners:
                    listener(call)
            return result
        finally:
            _inside.busy = False

    return attention


def _traced(
    original: Any,
    args: Args,
    kwargs: Kwargs,
    bind: Callable[[Args, Kwargs], Bound],
    arguments_of: Callable[[Bound], Arguments | None],
) -> Any:
    """The same for Dynamo, which follows: the map becomes a part of the graph and leaves through the op."""
    if not inside.paths or inside.busy:
        return original(*args, **kwargs)
    inside.busy.append(True)
    with torch.no_grad():
        arguments = arguments_of(bind(args, kwargs))
    if arguments is not None:
        torch.ops.torchtap.emit.default(attention_map(*arguments), site_name(inside.paths[-1], "attention"))
    result = original(*args, **kwargs)
    inside.busy.pop()
    return result


# -- the entry points ---------------------------------------------------------------------------------------


def _of_scaled_dot_product(bound: Bound) -> Arguments:
    return bound["query"], bound["key"], bound["attn_mask"], bound["is_causal"], bound["scale"]


def _of_multi_head(bound: Bound) -> Arguments:
    """``F.multi_head_attention_forward``: sequence first, projections still to be done."""
    query, key = _projected(bound, "query"), _projected(bound, "key")
    added = key.shape[2] - bound["key"].shape[0]
    return query, key, _joined_mask(bound["attn_mask"], bound["key_padding_mask"], query, added), False, None


def _projected(bound: Bound, part: str) -> Tensor:
    """The query, key or value of each head."""
    position = ("query", "key", "value").index(part)
    letter, heads, width = part[0], bound["num_heads"], bound["embed_dim_to_check"]
    given = bound[part].detach()
    if given.dim() == 2:  # no batch
        given = given.unsqueeze(1)
    rows = slice(position * width, (position + 1) * width)
    separate = bound["use_separate_proj_weight"]
    weight = bound[f"{letter}_proj_weight"] if separate else bound["in_proj_weight"][rows]
    bias = bound["in_proj_bias"]
    projected = functional.linear(given, weight, None if bias is None else bias[rows])
    if bound.get(f"bias_{letter}") is not None:
        projected = torch.cat([projected, bound[f"bias_{letter}"].expand(1, projected.shape[1], -1)])
    static = bound.get(f"static_{letter}")
    if static is not None:
        by_head: Tensor = static.reshape(projected.shape[1], heads, -1, width // heads)
    else:
        by_head = projected.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    if bound["add_zero_attn"] and part != "query":
        by_head = torch.cat([by_head, by_head.new_zeros(*by_head.shape[:2], 1, by_head.shape[3])], dim=2)
    return by_head


def _joined_mask(mask: Tensor | None, padding: Tensor | None, queries: Tensor, added: int) -> Tensor | None:
    """MultiheadAttention's masks, in which True means hidden, as one additive mask over batch and heads."""
    batch, heads = queries.shape[:2]
    joined: Tensor | None = None
    if mask is not None:
        joined = additive(~mask if mask.dtype == torch.bool else mask, queries)
        if joined.shape[0] == batch * heads:
            joined = joined.reshape(batch, heads, *joined.shape[1:])
        joined = functional.pad(joined, (0, added))
    if padding is not None:
        hidden = padding if padding.dim() == 2 else padding.unsqueeze(0)
        hidden = additive(~hidden if hidden.dtype == torch.bool else hidden, queries)[0]
        hidden = functional.pad(hidden, (0, added))[:, None, None, :]
        joined = hidden if joined is None else joined + hidden
    return joined


def _of_native(bound: Bound) -> Arguments | None:
    """Torch's own whole multi-head attention: batch first, one packed projection."""
    if bound["query"].is_nested or bound["key"].is_nested:
        return None
    query, key = (_packed(bound, part, bound[part], "num_head") for part in ("query", "key"))
    return query, key, _packed_mask(bound["mask"], query, key), False, None


def _of_encoder_layer(bound: Bound) -> Arguments | None:
    """Torch's own whole encoder layer: a whole layer in one call; its norm may come first."""
    if bound["src"].is_nested:
        return None
    query, key = _encoder_part(bound, "query"), _encoder_part(bound, "key")
    return query, key, _packed_mask(bound["mask"], query, key), False, None


def _encoder_part(bound: Bound, part: str) -> Tensor:
    source = bound["src"].detach()
    if bound["norm_first"]:
        width = bound["embed_dim"]
        source = functional.layer_norm(
            source, (width,), bound["norm_weight_1"], bound["norm_bias_1"], bound["eps"]
        )
    return _packed(bound, part, source, "num_heads")


def _packed(bound: Bound, part: str, given: Tensor, heads: str) -> Tensor:
    """One third of a packed projection, by head."""
    position, width = ("query", "key", "value").index(part), bound["embed_dim"]
    rows = slice(position * width, (position + 1) * width)
    projected = functional.linear(given.detach(), bound["qkv_weight"][rows], bound["qkv_bias"][rows])
    by_head: Tensor = projected.unflatten(-1, (bound[heads], -1)).transpose(1, 2)
    return by_head


def _packed_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    hidden = mask.bool()
    batch, rows, columns = query.shape[0], query.shape[2], key.shape[2]
    if hidden.dim() == 2 and hidden.shape == (batch, columns) and batch != rows:
        hidden = hidden[:, None, None, :]
    return additive(~hidden, query)


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


def _binder(names: list[str], defaults: dict[str, Any]) -> Callable[[Args, Kwargs], Bound]:
    """Builtins have no signature that Python can read, so theirs is written down here."""

    def bind(args: Args, kwargs: Kwargs) -> Bound:
        # Dynamo follows this, and that of torch 2.9 takes a ``strict=False`` for a true one: the ends are cut by hand.
        given = zip(names[: len(args)], args[: len(names)], strict=True)
        return {**dict.fromkeys(names), **defaults, **dict(given), **kwargs}

    return bind


def _multi_head_binder() -> Callable[[Args, Kwargs], Bound]:
    signature = inspect.signature(functional.multi_head_attention_forward)
    defaults = {p.name: None if p.default is p.empty else p.default for p in signature.parameters.values()}
    return _binder(list(defaults), defaults)


def _entry_points() -> list[_EntryPoint]:
    return [
        _EntryPoint(
            functional,
            "scaled_dot_product_attention",
            _binder(_SDPA_NAMES, _SDPA_DEFAULTS),
            _of_scaled_dot_product,
            lambda bound: bound["value"].detach(),
            gives_heads=True,
        ),
        _EntryPoint(
            functional,
            "multi_head_attention_forward",
            _multi_head_binder(),
            _of_multi_head,
            lambda bound: _projected(bound, "value"),
        ),
        _EntryPoint(
            torch,
            "_native_multi_head_attention",
            _binder(_NATIVE_NAMES, {}),
            _of_native,
            lambda bound: _packed(bound, "value", bound["value"], "num_head"),
        ),
        _EntryPoint(
            torch,
            "_transformer_encoder_layer_fwd",
            _binder(_ENCODER_NAMES, {}),
            _of_encoder_layer,
            lambda bound: _encoder_part(bound, "value"),
        ),
    ]
