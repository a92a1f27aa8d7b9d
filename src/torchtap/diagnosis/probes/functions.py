"""Functions of torch that say what a model does: softmax, attention, dropout.

Wrapped while the probe listens; what they compute is untouched. A compiler that follows the code sees the originals.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.diagnosis.probes.modes import ModeProbe
from torchtap.plan.names import site_name

__all__ = ["FunctionProbe"]

_AT_ONCE = 2  # modules whose attention is measured in one step, in turn; all of them the first time
_WIDEST = 512  # positions
_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_NO_OWNER = ""


@final
class FunctionProbe:
    """Looks at the arguments of a few functions in live steps."""

    def __init__(self, patient: Patient, tell: Telling, modes: ModeProbe) -> None:
        self._patient = patient
        self._tell = tell
        self._modes = modes
        self._originals: list[tuple[object, str, object]] = []
        self._attended: dict[str, int] = {}  # module to the step at which it was measured last
        self._measured = (-1, 0)  # how many were in this step

    def start(self) -> None:
        self._replace(F, "scaled_dot_product_attention", None, self._after_attention)
        for owner in (torch, torch.Tensor):  # F.softmax calls the method
            self._replace(owner, "softmax", None, self._after_softmax)
        for name in _DROPOUTS:
            if hasattr(F, name):
                self._replace(F, name, self._on_dropout)

    def stop(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, original)

    def _replace(
        self,
        owner: object,
        name: str,
        before: Callable[..., None] | None,
        after: Callable[..., None] | None = None,
    ) -> None:
        original = getattr(owner, name)
        tell = self

        @functools.wraps(original)
        def looked_at(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or not tell._wanted():
                return original(*args, **kwargs)
            if before is not None:
                tell._quietly(before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                tell._quietly(after, result, *args, **kwargs)
            return result

        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, looked_at)

    def _wanted(self) -> bool:
        return self._tell.live or self._modes.in_evaluation

    def _quietly(self, look: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Whatever is odd about the arguments is the function's own business."""
        try:
            with torch.no_grad():
                look(*args, **kwargs)
        except Exception:
            pass

    # -- attention ----------------------------------------------------------------------------------------

    def _after_softmax(self, result: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> None:
        if result.dim() < 3 or result.shape[-1] != result.shape[-2] or not self._tell.live:
            return
        dim = kwargs.get("dim", args[0] if args else -1)
        if dim in (-1, result.dim() - 1) and self._is_due():
            self._measure(result.flatten(0, -3)[:2], given.flatten(0, -3)[:2] > -1e4)

    def _after_attention(
        self, result: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if not self._tell.live or q.dim() < 3 or q.shape[-2] != k.shape[-2] or not self._is_due():
            return
        given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
        length = min(q.shape[-2], _WIDEST)
        one, other = (each.flatten(0, -3)[0, :length].float() for each in (q, k))
        scores = one @ other.mT * (given.get("scale") or 1 / math.sqrt(q.shape[-1]))
        scores = _masked(scores, given.get("attn_mask"), causal=bool(given.get("is_causal")))
        self._measure(scores.softmax(-1).nan_to_num()[None], (scores > -1e4)[None])

    def _is_due(self) -> bool:
        """Whether it is this module's turn: those that were measured longest ago come first."""
        path, step = self._caller(), self._tell.step
        last = self._attended.get(path)
        count = self._measured[1] if self._measured[0] == step else 0
        if last is not None:
            waited_more = sum(other < last for other in self._attended.values())
            if last == step or count >= _AT_ONCE or waited_more >= _AT_ONCE:
                return False
            self._measured = (step, count + 1)
        self._attended[path] = step
        return True

    def _measure(self, weights: Tensor, allowed: Tensor) -> None:
        length = min(weights.shape[-1], _WIDEST)
        if length < 4:
            return
        weights, allowed = weights[:, :length, :length].float(), allowed[:, :length, :length]
        path = self._caller()
        total = weights.sum().clamp_min(1e-12)
        above = float(weights.triu(1).sum() / total)
        self._tell.fact("attention-above", site_name(path, "attention"), above)
        counts = allowed.sum(-1)
        even = counts.float().log()
        rows = counts > 1
        entropy = torch.special.entr(weights).sum(-1)
        if bool(rows.any()):
            share = (entropy[rows] / even[rows]).mean()
            self._tell.number(site_name(path, "value", "attention_entropy"), share.clamp(0, 1))

    # -- dropout ------------------------------------------------------------------------------------------

    def _on_dropout(
        self, given: Tensor, p: float = 0.5, training: bool = True, *args: object, **kwargs: object
    ) -> None:
        if not (self._modes.in_evaluation and training and p > 0):
            return
        owner = self._owner_of_caller()
        if owner is not None and not type(owner).__module__.startswith("torch.nn.modules.dropout"):
            path = self._patient.paths[id(owner)]
            self._tell.fact(
                "ignores-eval", site_name(path, "output"), text="functional dropout with training=True"
            )

    def _caller(self) -> str:
        owner = self._owner_of_caller()
        return _NO_OWNER if owner is None else self._patient.paths[id(owner)]

    def _owner_of_caller(self) -> nn.Module | None:
        """The innermost module of this model whose code is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(owner, nn.Module) and id(owner) in self._patient.paths:
                return owner
            frame = frame.f_back
        return None


def _masked(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """The scores of one head, with what it may not look at set to minus infinity."""
    if mask is not None:
        shown = mask.flatten(0, -3)[0] if mask.dim() > 2 else mask
        shown = shown[: len(scores), : len(scores)]
        scores = scores.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else scores + shown
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores
