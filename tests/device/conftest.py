"""These tests register a device for the whole process, so `tests/test_devices.py` runs them in one of their own."""

from __future__ import annotations

import os

import pytest

if "TORCHTAP_LAG" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _device() -> None:
    from tests.device import lag

    lag.load()
    lag.reset()
