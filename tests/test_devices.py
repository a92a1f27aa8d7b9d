"""What torchtap promises on accelerators, tried on a device that runs behind the host (`tests/device`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.device import lag

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(bool(lag.missing()), reason=lag.missing() or "there is a compiler")
def test_everything_holds_on_a_device_that_runs_behind_the_host(tmp_path: Path) -> None:
    """A process of its own: a device is registered for good."""
    report = tmp_path / "report.xml"
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/device"],
        cwd=ROOT,
        env={
            **os.environ,
            "TORCHTAP_LAG": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    # What is printed depends on options; the report does not.
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counted = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counted.pop("tests") >= 50
    assert set(counted.values()) == {0}, counted
