"""These tests register a device for the whole process, so `tests/test_devices.py` runs them in one of their own."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

import pytest

if "TORCHTAP_LAG" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with a device that has nothing to do, and with slots of this test alone.

    Slots live as long as a block that uses them, and a closed watch lives until garbage is collected. So a mistake that
    one test plants would now and then leave wrong rows to the next.
    """
    from tests.device import lag

    from torchtap.reduce import slots

    lag.load()
    lag.reset()
    monkeypatch.setattr(slots, "_known", WeakValueDictionary())
