"""What ``make compat`` says of a run of the tests is what pytest reported."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests import torch_limits

COMPAT = runpy.run_path(str(Path(__file__).parents[1] / "packaging" / "compat.py"))

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_session" name="test_a"/>
<testcase classname="tests.taps.forms.test_matrix" name="test_b[x]">
  <failure message="E1&#10;more">trace</failure>
</testcase>
<testcase classname="tests.taps.test_walk" name="test_c"><skipped message="no such op in this torch"/></testcase>
<testcase classname="tests.taps.test_walk" name="test_d"><error message="broken fixture">trace</error></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_folder_and_failures_and_skips_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = COMPAT["outcome_of"](tmp_path / "report.xml")
    assert outcome.counts == {"core": {"passed": 1}, "taps": {"failed": 2, "skipped": 1}}
    COMPAT["told"](outcome, "2.15.0")
    printed = capsys.readouterr().out
    assert "FAILED tests.taps.forms.test_matrix::test_b[x]: E1\n" in printed
    assert "skipped    1: no such op in this torch" in printed
    assert printed.splitlines()[-1].startswith("| 2.15.0 | 3.")
    assert printed.splitlines()[-1].endswith("| core, taps | 1 | 2 | 1 |")


def test_another_torch_comes_with_the_setuptools_that_it_wants_and_all_else_as_pinned() -> None:
    pinned = (Path(__file__).parents[1] / "constraints.txt").read_text()
    mine, other = pinned.splitlines(), COMPAT["pins_for"]("2.11.0", pinned).splitlines()
    assert [line for line in mine if line not in other and not line.startswith("setuptools==")] == [
        "torch==2.13.0"
    ]
    assert [line for line in other if line not in mine] == ["torch==2.11.0"]
    assert not any(line.startswith("setuptools==") for line in other)


def test_the_documentation_lists_the_limits_of_older_torches() -> None:
    assert torch_limits.table() in torch_limits.DOCS.read_text(), f"put this there:\n{torch_limits.table()}"


@pytest.mark.parametrize("limit", torch_limits.LIMITS, ids=lambda limit: limit.what[:20])
def test_a_limit_holds_below_its_version_and_skips_there(
    limit: torch_limits.Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, holds in (
        ("2.9.0", True),
        ("2.9.1+cu128", True),
        (f"{limit.since}.0+cpu", False),
        ("3.0.0", False),
    ):
        monkeypatch.setattr(torch_limits, "TORCH_VERSION", version)
        assert limit.holds is holds
        assert limit.skip.args == (holds,)
    assert limit.skip.kwargs["reason"].startswith(f"before torch {limit.since}: ")
