"""The ways of measuring: the native kernel, torch ops and, where Triton's interpreter is at work, its kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from torchtap.reduce import device_kernel, kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["native", "torch", *(["triton"] if INTERPRETED else [])])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with the native kernel, as if it had not been built, and (see test_triton_kernel) with Triton."""
    if request.param != "native":
        monkeypatch.setattr(kernel, "native", None)
    elif kernel.native is None:
        pytest.skip("the native kernel is not built here")
    if request.param == "triton":
        from torchtap.reduce import triton_kernel

        monkeypatch.setattr(device_kernel, "_DEVICES", frozenset({"cpu"}))
        # The interpreter takes as long for a small block as for a large one.
        monkeypatch.setattr(triton_kernel, "_BLOCK", 1 << 14)
    yield str(request.param)
    assert device_kernel._possible
