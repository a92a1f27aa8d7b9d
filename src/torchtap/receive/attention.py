"""Attention maps for a receiver, with no change in the model.

Fused kernels never form the probabilities. So while an attention tap is active, the four functions in which torch
computes attention are wrapped: ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``
(``nn.MultiheadAttention``), and the two inference fast paths. The map is computed a second time from the same
arguments, without dropout, a few heads at a time. It belongs to the innermost module whose code made the call. It
guarantees:
- the model's own call runs with the arguments that it was given, and no random number is drawn;
- the wrappers are removed with the last listener;
- an attention that one entry point passes to another is reported once, and a checkpoint's replay is not reported.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from torchtap._torch import in_backward
from torchtap.hooks.hooks import Handle
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.plan.names import site_name
from torchtap.receive import by_name, reasons
from torchtap.receive.receiver import Receiver

__all__ = ["AttentionCall", "Listener", "listen", "report_attention"]


def report_attention(receiver: Receiver) -> Handle:
    """Pass the map of every attention of a model to its receiver, until the handle is removed."""
    return listen(partial(_report, receiver))


def _report(receiver: Receiver, call: AttentionCall) -> None:
    current = receiver.current()
    if current is None:
        return
    ports = receiver.enclosing("attention", by_name.owner_of(call.frame, receiver.path_of) or "")
    if not ports:
        return
    arguments = call.arguments
    if arguments is None:
        for port in ports:
            port.note = reasons.NESTED_ATTENTION
        return
    query, key = with_batch(arguments[0]), arguments[1]
    shape = (*query.shape[:3], key.shape[-2])
    for port in ports:
        site = receiver.accumulator.site(port, "", current.next_leaf_call(port, ""), current.number)
        # A map may be too large to hold, so elementwise reductions get it in pieces.
        if site is not None:
            receiver.accumulator.fold_pieces(site, shape, lambda: attention_pieces(*arguments))


# -- maps -------------------------------------------------------------------------------------------------

# Elements of the probabilities that are formed at a time, at least one head.
_PIECE_ELEMENTS = 1 << 24


def attention_pieces(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Iterator[Tensor]:
    """Yield softmax probabilities ``(batch, heads, queries, keys)``, a few heads at a time, in order.

    In grouped-query attention a key head serves several query heads.
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
    """Return ``(batch, heads, length, width)`` from fewer or more leading dimensions."""
    while value.dim() < 4:
        value = value.unsqueeze(0)
    return value.flatten(0, -4) if value.dim() > 4 else value


def _bias(mask: Tensor | None, is_causal: bool, rows: int, columns: int, like: Tensor) -> Tensor | None:
    """Return any mask as an additive one of at least three dimensions."""
    if is_causal:
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril()
        causal = torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(
            ~allowed, -math.inf
        )
        return causal.unsqueeze(0) if mask is None else causal + additive(mask, like)
    return None if mask is None else additive(mask, like)


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask in which True means visible as numbers to add, with at least three dimensions."""
    mask = mask.detach()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -math.inf)
    while mask.dim() < 3:
        mask = mask.unsqueeze(0)
    return mask


def attention_map(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the map of all heads at once, in a form that a compiler can trace."""
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


# -- calls ------------------------------------------------------------------------------------------------

Bound: TypeAlias = dict[str, Any]  # an entry point's arguments by name
# Query and key by head, the mask, whether it is causal, and the scale.
Arguments: TypeAlias = tuple[Tensor, Tensor, Tensor | None, bool, float | None]
Part: TypeAlias = Callable[[Bound], Tensor]


class _EntryPoint(NamedTuple):
    """A function that computes attention, and the functions that read its arguments."""

    owner: Any
    name: str
    bind: Callable[[Args, Kwargs], Bound]
    arguments: Callable[[Bound], Arguments | None]
    value: Part
    gives_heads: bool = False  # True if its result is that of each head


@final
class AttentionCall:
    """One call that computed attention. Its parts are computed at their first use."""

    def __init__(self, entry: _EntryPoint, bound: Bound, result: Any, frame: FrameType | None) -> None:
        self._entry = entry
        self._bound = bound
        self._result = result
        self.frame = frame  # of the caller

    @cached_property
    def arguments(self) -> Arguments | None:
        """Return its arguments; None for nested tensors, whose heads cannot be separated."""
        with torch.no_grad():
            return self._entry.arguments(self._bound)

    @cached_property
    def value(self) -> Tensor:
        """Return the values by head."""
        with torch.no_grad():
            return self._entry.value(self._bound)

    def by_head(self) -> Tensor:
        """Return the output of each head; computed again, without dropout, if the function does not return it."""
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
    """One listener. The last one to be removed removes the wrappers."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def remove(self) -> None:
        """Remove it; a second call does nothing."""
        global _listeners
        with _lock:
            had = bool(_listeners)
            _listeners = tuple(each for each in _listeners if each is not self._listener)
            if had and not _listeners:
                _unwrap()


def listen(listener: Listener) -> _Listening:
    """Call ``listener`` for every attention in any thread, until the handle is removed."""
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
        # Others may have wrapped ours meanwhile. They keep it, as a no-op.
        if getattr(entry.owner, entry.name) is wrapper:
            setattr(entry.owner, entry.name, original)
    _wrapped.clear()


def _wrapper(original: Any, entry: _EntryPoint) -> Any:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(original, args, kwargs, entry.bind, entry.arguments)
        if getattr(_inside, "busy", False):  # one entry point calls another
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
    """Do the same while Dynamo traces: the map becomes a part of the graph and leaves through the op."""
    if not by_name.paths or by_name.busy:
        return original(*args, **kwargs)
    by_name.busy.append(True)
    with torch.no_grad():
        arguments = arguments_of(bind(args, kwargs))
    if arguments is not None:
        torch.ops.torchtap.emit.default(attention_map(*arguments), site_name(by_name.paths[-1], "attention"))
    result = original(*args, **kwargs)
    by_name.busy.pop()
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
    """Return the query, key or value of each head."""
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
    """Return MultiheadAttention's masks, in which True means hidden, as one additive mask over batch and heads."""
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
    """Return one third of a packed projection, by head."""
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
    """Return a function that binds arguments to names: builtins have no signature that Python can read."""

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
