"""Every test starts from the same random state and leaves no session behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    yield
    from torchtap.taps import active

    assert not active._active, "a session is still listening"
