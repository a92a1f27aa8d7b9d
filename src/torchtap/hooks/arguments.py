"""The former place of names of `leaves`, for callers that have not moved."""

from __future__ import annotations

from torchtap.hooks.leaves import Args, Function, Kwargs

__all__ = ["Args", "Function", "Kwargs"]
