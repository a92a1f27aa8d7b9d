"""Fixtures of the tests of runs."""

from __future__ import annotations

import pytest

from torchtap.store.write import segments


@pytest.fixture
def a_file_for_each_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no flush replace the files of earlier ones."""
    for kind in segments.FULL:
        monkeypatch.setitem(segments.FULL, kind, 0)
