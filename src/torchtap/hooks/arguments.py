"""The arguments of a call, as Python hands them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Args", "Function", "Kwargs"]

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., object]  # that is called with them
