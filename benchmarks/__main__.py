"""``python -m benchmarks``: measure everything and write ``benchmarks/RESULTS.md``.

    python -m benchmarks                    what torchtap costs; under a quarter of an hour on two cores
    python -m benchmarks --all              the other parts built on it as well
    python -m benchmarks --only steps       one table (again, to be given for several); the others stay as they are
    python -m benchmarks --quick            fewer rounds: a glance, not a result

Each table runs in a process of its own, one after another: some peers change torch when they are imported, and what
one table leaves in memory should not slow the next.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from benchmarks.timing import table

__all__ = ["TABLES", "main"]

RESULTS = Path(__file__).with_name("RESULTS.md")

# The file of each table and its heading, in the order of the report: what has bars and peers, then the rest.
CORE = {
    "steps": "Training steps",
    "share": "The share of a step",
    "accompanied": "Trainings that are accompanied all the time",
    "doctor": "Training under a doctor",
    "compiled": "Training steps of a compiled model",
    "capture": "Capturing tensors",
    "kernel": "Statistics of one tensor",
    "storage": "Writing and reading runs",
    "growth": "Growth",
    "memory": "Peak memory",
    "startup": "Starting",
    "module_monitor": "Module monitor",
    "layers": "Recording layers",
    "datasets": "Activation datasets",
}
TABLES = {
    **CORE,
    "ranks": "Many ranks",
    "monitor": "Monitor",
    "compare": "Comparing",
    "golden": "Checking goldens",
    "viewer": "Viewer",
}
_MARK = "__rows__"
_VERSIONS = (
    "torchtap",
    "torch",
    "numpy",
    "torch-module-monitor",
    "nnsight",
    "torchlens",
    "tdhook",
    "wandb",
    "tensorboard",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what torchtap costs.")
    parser.add_argument("--only", action="append", choices=TABLES, help="measure this table; may be repeated")
    parser.add_argument("--all", action="store_true", help="measure every table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--print", dest="child", choices=TABLES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        _measure_here(asked.child, asked.quick)
        return 0
    failed = 0
    for name in asked.only or (TABLES if asked.all else CORE):
        begin = time.perf_counter()
        text = _measure(name, asked.quick)
        minutes = (time.perf_counter() - begin) / 60
        failed += text is None
        print(f"## {name} ({minutes:.1f} minutes)\n\n{text or 'failed'}\n", flush=True)
        if text is not None:
            _write(name, text, minutes, asked.quick)
    return 1 if failed else 0


def _measure_here(name: str, quick: bool) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    takes_quick = "quick" in inspect.signature(module.run).parameters
    rows = module.run(quick=quick) if takes_quick else module.run()
    rows = [rows] if isinstance(rows, dict) else rows
    about = " ".join((module.__doc__ or "").split())
    print(_MARK + json.dumps({"about": about, "rows": rows}, default=str))


def _measure(name: str, quick: bool) -> str | None:
    """The table's text, or None where measuring failed."""
    command = [sys.executable, "-m", "benchmarks", "--print", name, *(["--quick"] if quick else [])]
    root = RESULTS.parent.parent
    path = os.pathsep.join([str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK) :])
            return f"{found['about']}\n\n{table(found['rows'])}"
    return None


def _write(name: str, text: str, minutes: float, quick: bool) -> None:
    """Put one section into the report in place of the one that was there."""
    sections = _sections()
    rounds = ", few rounds" if quick else ""
    when = time.strftime("%Y-%m-%d")
    sections[name] = (
        f"## {TABLES[name]}\n\n{text}\n\n`benchmarks/{name}.py`, {when}, {minutes:.1f} minutes{rounds}.\n"
    )
    report = [_heading(), *(sections[each] for each in TABLES if each in sections)]
    RESULTS.write_text("\n".join(report), encoding="utf-8")


def _sections() -> dict[str, str]:
    if not RESULTS.exists():
        return {}
    pieces = re.split(r"^(?=## )", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_title = {title: name for name, title in TABLES.items()}
    return {
        by_title[title]: f"{piece.strip()}\n"
        for piece in pieces
        if (title := piece.partition("\n")[0].removeprefix("## ")) in by_title
    }


def _heading() -> str:
    versions = ", ".join(f"{name} {version}" for name in _VERSIONS if (version := _version(name)))
    return (
        "# What torchtap costs\n\n"
        "Written by `make bench`. A ratio is the median of ratios to the same work without torchtap right before or "
        "after, all cases in random order in one process; brackets hold the quartiles. `holds` is undecided where "
        "twice the standard error of the median reaches over the bar: the machine was not quiet enough to tell. What "
        "the numbers mean is told in `docs/speed.md`.\n\n"
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{versions}.\n"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
