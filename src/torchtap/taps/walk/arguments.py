"""The arguments of a call, as Python hands them on."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Args", "Kwargs"]

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
