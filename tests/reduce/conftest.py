"""Both ways of measuring: the native kernel and torch ops."""

from __future__ import annotations

import pytest

from torchtap.reduce import kernel


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: with the native kernel, and as if it had not been built."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "native", None)
    elif kernel.native is None:
        pytest.skip("the native kernel is not built here")
    return str(request.param)
