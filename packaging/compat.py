"""Run the tests with another torch, in an environment of its own that is removed afterwards.

    python3.13 packaging/compat.py 2.15.0 [--keep] [tests/taps tests/clock …]

The Python that runs this is the one that is tested. Everything but torch and setuptools comes in the versions of
constraints.txt.
Prints a line for each folder of tests, each failure and each kind of skip, and a row for the table of docs/install.md.
Exit code 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Outcome:
    """What pytest's report says, by folder of tests."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, case: ElementTree.Element) -> None:
        """Count one test case of the report."""
        folder = folder_of(case.get("classname", ""))
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        self.counts.setdefault(folder, Counter())[result] += 1
        if result == "failed":
            self.failed.append(f"{case.get('classname')}::{case.get('name')}: {first_line(case)}")
        if result == "skipped":
            self.reasons[str(next(iter(case)).get("message", ""))] += 1

    @property
    def total(self) -> Counter[str]:
        """All folders together."""
        return sum(self.counts.values(), Counter())


def folder_of(classname: str) -> str:
    """``tests.taps.eager.test_hooks`` is of ``taps``; a file of the tests' own folder counts as ``core``."""
    parts = classname.removeprefix("tests.").split(".")
    return parts[0] if len(parts) > 1 else "core"


def first_line(case: ElementTree.Element) -> str:
    """What a failure says, on one line."""
    message = str(next(iter(case)).get("message", ""))
    return message.splitlines()[0][:160] if message else ""


def outcome_of(report: Path) -> Outcome:
    """Read pytest's JUnit report."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome.add(case)
    return outcome


def pins_for(torch: str, pinned: str) -> str:
    """The pins of this repository with another torch, which may want another setuptools: 2.11 takes none from 82 on."""
    other = re.sub(r"^torch==.*$", f"torch=={torch}", pinned, flags=re.MULTILINE)
    return re.sub(r"^setuptools==.*\n", "", other, flags=re.MULTILINE)


def environment_with(torch: str, folder: Path) -> Path:
    """Make an environment with that torch and everything that the tests need; its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if python.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    others = folder / "constraints.txt"
    others.write_text(pins_for(torch, (ROOT / "constraints.txt").read_text()))
    # Python compiles what the tests import; all of it would take longer than the tests.
    options = ["--quiet", "--no-cache-dir", "--no-compile", "--disable-pip-version-check"]
    pip = [str(python), "-m", "pip", "install", *options]
    # The build runs the same torch-free setup.py as every other installation's.
    subprocess.run([*pip, "-c", str(others), f"torch=={torch}", "-e", f"{ROOT}[dev]"], check=True, cwd=ROOT)
    return python


def tested(python: Path, tests: list[str], workers: int) -> Outcome:
    """Run the tests there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        subprocess.run(
            [str(python), "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider", *spread, *tests],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        return outcome_of(report)


def told(outcome: Outcome, torch: str) -> None:
    """Print what happened."""
    for folder, counts in sorted(outcome.counts.items()):
        print(
            f"{folder:15} {counts['passed']:5} passed {counts['failed']:4} failed {counts['skipped']:4} skipped"
        )
    for reason, count in outcome.reasons.most_common():
        print(f"skipped {count:4}: {reason}")
    for line in outcome.failed:
        print(f"FAILED {line}")
    total = outcome.total
    print(
        f"| {torch} | {platform.python_version()} | {', '.join(sorted(outcome.counts))} | {total['passed']:,} "
        f"| {total['failed']:,} | {total['skipped']:,} |"
    )


def main() -> None:
    """Run the tests with the torch that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch")
    parser.add_argument("tests", nargs="*", help="folders or files of tests; all without")
    parser.add_argument("--keep", action="store_true", help="leave the environment for another run")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    folder = ROOT / ".venv-compat" / f"{asked.torch}-py{sys.version_info.major}.{sys.version_info.minor}"
    try:
        outcome = tested(environment_with(asked.torch, folder), asked.tests, asked.workers)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    told(outcome, asked.torch)
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
