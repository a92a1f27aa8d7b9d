"""Every test starts from the same random state and leaves no session behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("torchtap", deadline=None)
settings.load_profile("torchtap")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # compiled code of an earlier test counts against later ones' limits
        torch._dynamo.reset()
    yield
    from torchtap.receive import active

    assert not active._active, "a session is still listening"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of pages: a process can drive one at a time."""
    from tests.viewer.browsing import chromium, need_browser

    need_browser()
    with chromium() as opened:
        yield opened
