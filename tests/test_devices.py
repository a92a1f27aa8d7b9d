"""What torchtap promises on accelerators, tried on a device that runs behind the host (`tests/device`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.device import lag

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(bool(lag.missing()), reason=lag.missing() or "there is a compiler")
def test_everything_holds_on_a_device_that_runs_behind_the_host() -> None:
    """A process of its own: a device is registered for good."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "tests/device",
        ],
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
    assert " passed" in done.stdout
