"""Optional packages in tests: one that is missing or broken skips what needs it, with the reason, and nothing else."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest

__all__ = ["need"]


def need(name: str) -> Any:
    """Import a module and return it; skip the test, or at a file's top the file, if that fails in whatever way."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except Exception as error:
        first = str(error).partition("\n")[0]
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {first}", allow_module_level=True)
