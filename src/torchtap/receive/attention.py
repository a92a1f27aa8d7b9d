"""Attention maps for a receiver, with no change in the model.

The functions that compute attention (`attention_calls`) tell of each call while a tap is live; a map belongs to the
innermost module whose code made the call, and is computed a second time, in pieces (`attention_maps`).
"""

from __future__ import annotations

from functools import partial

from torchtap.hooks.hooks import Handle
from torchtap.receive import reasons
from torchtap.receive.active import owner_of
from torchtap.receive.attention_calls import AttentionCall, listen
from torchtap.receive.attention_maps import attention_pieces, with_batch
from torchtap.receive.receiver import Receiver

__all__ = ["report_attention"]


def report_attention(receiver: Receiver) -> Handle:
    """Have a receiver take the map of every attention of its model, until the handle is removed."""
    return listen(partial(_report, receiver))


def _report(receiver: Receiver, call: AttentionCall) -> None:
    if not receiver.hears_this_thread():
        return
    ports = receiver.enclosing("attention", owner_of(call.frame, receiver.path_of) or "")
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
        entry = receiver.folding.entry(port, "", port.next_leaf_call(receiver.pass_number, ""))
        # A map may be too large to hold: reductions that do not mind get it piece by piece.
        if entry is not None:
            receiver.folding.fold_pieces(entry, shape, lambda: attention_pieces(*arguments))
