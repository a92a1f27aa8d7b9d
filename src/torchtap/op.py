"""Importing this makes torchtap's op known to torch, for programs that load models with taps by torch's own loaders."""

from __future__ import annotations

from torchtap.forms.op.op import register

__all__ = ["register"]

register()
