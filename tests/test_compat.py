"""What ``make compat`` says of a run of the tests is what pytest reported."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
