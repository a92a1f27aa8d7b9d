"""Whether padded positions get gradients: at the embeddings of an eager model, in the first live steps."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap.diagnosis.probes.base import Patient, Telling
from torchtap.diagnosis.probes.pairs import padding
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.walker import Walker
from torchtap.plan.names import site_name
from torchtap.receive.gradients import ask_for_gradient

__all__ = ["PaddingProbe"]

_LOOKS = 4


@final
class PaddingProbe:
    """Stops at embeddings."""

    def __init__(self, patient: Patient, tell: Telling) -> None:
        self._patient = patient
        self._tell = tell
        self._walker = Walker(patient.tree)
        self._padded: dict[str, Tensor] = {}
        self._looked: dict[str, int] = {}

    def start(self) -> None:
        if self._patient.compiled:
            return
        for place in self._patient.places:
            if isinstance(place.module, nn.Embedding):
                self._walker.before(place.module, place.path, self._on_tokens, lambda *_: None)
                self._walker.after(place.module, place.path, self._on_output, lambda _: None)

    def stop(self) -> None:
        self._walker.leave()
        self._padded.clear()

    def _on_tokens(self, path: str, args: Args, kwargs: Kwargs) -> None:
        looked = self._looked.get(path, 0)
        if not (self._tell.live and torch.is_grad_enabled()) or looked >= _LOOKS:
            return
        self._looked[path] = looked + 1
        tokens = args[0] if args else kwargs.get("input")
        found = padding(tokens) if isinstance(tokens, Tensor) else None
        if found is not None:
            self._padded[path] = found

    def _on_output(self, path: str, output: Any) -> None:
        padded = self._padded.pop(path, None)
        if padded is not None and isinstance(output, Tensor) and output.requires_grad:
            ask_for_gradient(output, partial(self._on_gradient, path, padded))

    def _on_gradient(self, path: str, padded: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.shape[:2] == padded.shape and bool((gradient[padded] != 0).any()):
            share = float(padded.float().mean())
            self._tell.fact(
                "padding-learns",
                site_name(path, "output"),
                share,
                f"{share:.0%} of the positions are padding",
            )
