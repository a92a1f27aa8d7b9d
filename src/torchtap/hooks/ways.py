"""The former place of `before` and `after`, for callers that have not moved."""

from __future__ import annotations

from torchtap.hooks.hooks import Handle, WayName, after, before
from torchtap.hooks.leaves import Function as Action

__all__ = ["Action", "Handle", "HookWay", "WayName"]


class HookWay:
    """`before` and `after`."""

    before = staticmethod(before)
    after = staticmethod(after)
