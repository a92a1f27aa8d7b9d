"""Every test starts from the same random state and leaves no session behind. The slow ones are marked from a list.

``tests/slow.txt`` names the tests that take more than two seconds; ``--write-slow`` measures and writes it. CPU time of
the test and of the processes that it waited for is measured, so that a busy machine gives the same list.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
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
    from torchtap.receive import by_name as active

    assert not active._active, "a session is still listening"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of pages: a process can drive one at a time."""
    from tests.viewer.browsing import chromium, need_browser

    need_browser()
    with chromium() as opened:
        yield opened


SLOW = Path(__file__).with_name("slow.txt")
SECONDS = 2.0
_slow: set[str] = set()
_ran: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow", action="store_true", help="measure, and write tests/slow.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the list names. A line without parameters names all cases of a test."""
    listed = set(SLOW.read_text(encoding="utf-8").splitlines()) if SLOW.exists() else set()
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker(pytest.mark.slow)


def _cpu() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = _cpu()
    return (yield)


_STARTED = pytest.StashKey[float]()


def _torch_lies_in_a_folder_with_a_space() -> bool:
    import torch

    return " " in torch.__file__


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    report.user_properties.append(("cpu", _cpu() - item.stash[_STARTED]))
    if report.failed and "CppCompileError" in report.longreprtext and _torch_lies_in_a_folder_with_a_space():
        # Plain torch.compile fails there as well: Inductor does not quote torch's folder for the C++ compiler.
        report.outcome = "skipped"
        reason = "Skipped: Inductor cannot compile when the folder of torch has a space in its name"
        report.longrepr = (str(item.path), item.reportinfo()[1] or 0, reason)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note slow tests; with several workers this runs in the process that leads them."""
    _ran.add(report.nodeid)
    if max((value for name, value in report.user_properties if name == "cpu"), default=0.0) > SECONDS:
        _slow.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-slow") and not hasattr(session.config, "workerinput"):
        known = set(SLOW.read_text(encoding="utf-8").splitlines()) if SLOW.exists() else set()
        kept = {
            line for line in known if line not in _ran and not any(r.startswith(f"{line}[") for r in _ran)
        }
        SLOW.write_text("".join(f"{line}\n" for line in sorted(kept | _slow)), encoding="utf-8")
