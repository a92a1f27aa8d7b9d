"""The pytest plugin: the fixture ``torchtap_golden`` and the option ``--torchtap-golden``.

It imports torch only when a test uses the fixture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["GoldenFixture", "torchtap_golden"]

_OPTION = "--torchtap-golden"
_MODES = ("record", "check", "accept")
_REPORTS = "torchtap-golden-report"
_said = pytest.StashKey[list[str]]()
_used = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting of the folder."""
    group = parser.getgroup("torchtap")
    group.addoption(
        _OPTION,
        metavar="MODE",
        help="record: record goldens that do not exist yet; check: fail without one; accept[:NAME]: record anew. "
        "Without it, the first run records and later ones check; with CI set, all check",
    )
    parser.addini(
        "torchtap_golden_dir", "folder of goldens, relative to the root; 'golden' beside each test file"
    )


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Let ``--torchtap-golden=accept NAME`` have a name that is no path."""
    for number, word in enumerate(args[:-1]):
        name = args[number + 1]
        if word == f"{_OPTION}=accept" and name[:1] != "-" and not Path(name.partition("::")[0]).exists():
            args[number : number + 2] = [f"{word}:{name}"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a mode that does not exist, before any test runs."""
    mode = str(config.getoption(_OPTION) or "check").partition(":")[0]
    if mode not in _MODES:
        raise pytest.UsageError(f"{_OPTION}={mode}: the modes are {', '.join(_MODES)}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the goldens that were written."""
    for line in config.stash.get(_said, []):
        terminalreporter.write_line(line)


@pytest.fixture
def torchtap_golden(request: pytest.FixtureRequest) -> GoldenFixture:
    """Compare a model with its golden: ``torchtap_golden(model, inputs)``."""
    return GoldenFixture(request)


class GoldenFixture:
    """Made by the fixture. Each call checks, or records, one golden."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request, self._config = request, request.config

    def __call__(self, model: Any, inputs: Any, *, name: str | None = None) -> None:
        """Check a model's forward pass on ``inputs``.

        ``name`` is that of the golden, else of the test. Several tests may give one name: they have one golden.
        """
        self._run(name, model, inputs, 0)

    def training(self, make: Callable[[], Any], *, steps: int = 3, name: str | None = None) -> None:
        """Check a few steps of a training. ``make()`` returns a new model and ``step(i)``, which returns the loss."""
        self._run(name, make, None, steps)

    def _run(self, name: str | None, model: Any, inputs: Any, steps: int) -> None:
        from torchtap import golden
        from torchtap.errors import CompareError
        from torchtap.golden.store import MANIFEST, folder_of

        given, root, used = name, self._root(), self._config.stash.setdefault(_used, {})
        name = name or re.sub(r"[^\w\-.]+", "-", self._request.node.name.removeprefix("test_")).strip("-")
        first = used.setdefault(name, self._request.node.nodeid) == self._request.node.nodeid
        if not first and given is None:
            pytest.fail(f"golden {name!r} is used twice, also by {used[name]}: give name=...", pytrace=False)
        try:
            exists = (folder_of(root, name) / MANIFEST).exists()
            if self._records(name, exists) and (first or not exists):
                folder = golden.record(name, model, inputs, steps=steps, root=root)
                said = f"torchtap: golden {name!r} {'accepted' if exists else 'recorded'} in {folder}"
                self._config.stash.setdefault(_said, []).append(said)
                return
            verdict = golden.check(name, model, inputs, steps=steps, root=root)
        except CompareError as error:
            pytest.fail(f"{error}\n  record it: pytest {_OPTION}=record, or =accept:{name}", pytrace=False)
        if not verdict.same:
            pytest.fail(report(verdict, self._config.rootpath), pytrace=False)

    def _records(self, name: str, exists: bool) -> bool:
        default = os.environ.get("TORCHTAP_GOLDEN") or ("check" if os.environ.get("CI") else "record")
        mode, _, only = str(self._config.getoption(_OPTION) or default).partition(":")
        if mode == "accept":
            return not only or only == name
        return mode == "record" and not exists

    def _root(self) -> Path:
        given = os.environ.get("TORCHTAP_GOLDEN_DIR") or self._config.getini("torchtap_golden_dir")
        return self._config.rootpath / given if given else self._request.path.parent / "golden"


def report(verdict: Any, root: Path, accept: str = f"pytest {_OPTION}=accept:") -> str:
    """Write a failure's page and its text, and return the text."""
    folder = Path(os.environ.get("TORCHTAP_GOLDEN_REPORT") or root / _REPORTS)
    folder.mkdir(parents=True, exist_ok=True)
    stem = verdict.name.replace("/", "-")
    page = verdict.to_html(folder / f"{stem}.html")
    (folder / f"{stem}.txt").write_text(f"{verdict}\n", encoding="utf-8")
    return f"{verdict}\n  report: {page}\n  if this is intended: {accept}{verdict.name}"
