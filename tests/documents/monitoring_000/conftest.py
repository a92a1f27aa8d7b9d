"""The document's training and monitor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.documents.monitoring_000.batches import MONITOR_EPOCHS, MONITOR_LAYERS
from tests.monitors.training import setting

from torchtap import Monitor


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets write beside themselves."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def training() -> SimpleNamespace:
    return setting()


@pytest.fixture
def monitor(training: SimpleNamespace, tmp_path: Path) -> Monitor:
    return Monitor(
        model=training.model,
        layers_to_monitor=MONITOR_LAYERS,
        epochs_to_record=MONITOR_EPOCHS,
        output_dir=str(tmp_path / "outputs"),
        batch_indices=[0, 1],
    )
