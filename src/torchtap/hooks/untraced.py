"""The former place of names of `conceal`, for callers that have not moved."""

from __future__ import annotations

from torchtap.hooks.conceal import Hook, Traveller, conceal, reveal

__all__ = ["Hook", "Traveller", "conceal", "reveal"]
