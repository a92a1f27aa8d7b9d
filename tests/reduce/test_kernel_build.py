"""The compiled kernel is used only if it is the one that this source was written for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import torchtap.reduce
from torchtap.reduce import kernel
from torchtap.reduce.moments import WIDTH


def test_a_build_of_an_older_source_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("_native")
    for name in ("fold", "measure"):
        setattr(stale, name, print)
    monkeypatch.setitem(sys.modules, "torchtap.reduce._native", stale)
    monkeypatch.setattr(torchtap.reduce, "_native", stale, raising=False)
    assert kernel._load() is None
    for name in kernel._FUNCTIONS:
        setattr(stale, name, print)
    assert kernel._load() is None
    stale.FIELDS = WIDTH  # type: ignore[attr-defined]
    assert kernel._load() is stale
