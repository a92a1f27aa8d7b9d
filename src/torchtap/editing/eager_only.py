"""Models that hooks reach: eager ones, and compiled ones while they run eagerly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from torchtap.errors import FormError
from torchtap.forms.attach import form_of
from torchtap.spi import unwrap

__all__ = ["hookable", "refuse_inlined", "running_eagerly"]


def hookable(model: Any, what: str) -> nn.Module:
    """Return the eager model inside; raise an error that names what ``what`` needs."""
    form = form_of(model)
    if form not in ("eager", "compiled", "graph"):
        raise FormError(
            f"{what} needs modules that Python runs, and this model is {form}: use the model that it was made from"
        )
    return unwrap(model)


def refuse_inlined(model: object, path: str, what: str) -> None:
    """Raise `FormError` if a graph has taken the module at a path apart, so that no hook on it is ever called."""
    if not isinstance(model, fx.GraphModule) or not path:
        return
    from torchtap.forms.graph.attachment import called_modules

    if path not in called_modules(model):
        raise FormError(
            f"{what} needs modules that Python runs, and this graph has taken {path!r} apart: use the model that it "
            "was made from"
        )


def running_eagerly(model: object) -> AbstractContextManager[Any]:
    """Run a compiled model eagerly inside this block, so that its hooks run."""
    if form_of(model) != "compiled":
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
