"""Find out what form a model has and put a plan's taps on it."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchtap.errors import FormError
from torchtap.taps.eager import Attachment, EagerAttachment
from torchtap.taps.fitting import Via
from torchtap.taps.receiver import Receiver

__all__ = ["attach"]


def attach(model: Any, receiver: Receiver, via: Via = "hook") -> Attachment:
    """An attachment for this model's form."""
    if isinstance(model, nn.Module):
        return EagerAttachment(model, receiver, via)
    raise FormError(f"cannot tap a {type(model).__name__}: give an nn.Module")
