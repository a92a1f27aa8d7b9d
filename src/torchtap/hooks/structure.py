"""The former place of names of `leaves`, for callers that have not moved."""

from __future__ import annotations

from torchtap.hooks.leaves import fill, from_names, map_inputs, map_leaves, plain, skeleton

__all__ = ["fill", "from_names", "map_inputs", "map_leaves", "plain", "skeleton"]
