"""The former place of names of `replace`, for callers that have not moved."""

from __future__ import annotations

from torchtap.hooks.replace import ModeHook

__all__ = ["ModeHook"]
