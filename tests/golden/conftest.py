"""The golden fixture, also where an older installation has no entry point for it yet."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("torchtap"):
        config.pluginmanager.import_plugin("torchtap.integrations.pytest_golden")
