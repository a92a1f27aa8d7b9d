"""``python -m benchmarks.beside CHECKOUT [--only share] [--times 3]``: this checkout's tables beside another commit's.

Both measure with their own benchmarks, in turns, so that both meet the same machine. Rows that both have stand side by
side. A row is worse where this checkout's best turn is above the other's worst. Build the native parts of the other
checkout first (``python setup.py build_ext --inplace``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.timing import table

__all__ = ["main", "rows_beside"]

HERE = Path(__file__).parents[1]
_MARK = "__rows__"
# Columns in which less is better, with a number first.
MEASURES = ("with / without", "as a ratio", "fixed ms", "seconds", "inside", "statistics µs")
# torch loads what the installed torchtap names as its backend, which the other commit may not have.
_NEUTRAL = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# What a row is about; figures and bars are not.
NAMES = ("model", "case", "what", "with", "dtype", "KiB", "threads", "over", "amount", "width")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument(
        "checkout", type=Path, help="another checkout of torchtap, with its native parts built"
    )
    parser.add_argument("--only", action="append", help="a table; may be repeated")
    parser.add_argument("--times", type=int, default=3, help="how often each side measures")
    asked = parser.parse_args()
    for name in asked.only or ("share", "startup", "capture", "steps", "module_monitor"):
        print(f"## {name}\n\n{table(rows_beside(name, asked.checkout.resolve(), asked.times))}\n", flush=True)
    return 0


def rows_beside(name: str, other: Path, times: int) -> list[dict[str, Any]]:
    """A row for each number that both checkouts measure: the median and the range of all turns."""
    found: dict[Path, dict[tuple[str, str], list[float]]] = {
        root: defaultdict(list) for root in (other, HERE)
    }
    for turn in range(times):
        for root in (other, HERE) if turn % 2 == 0 else (HERE, other):
            for row in _measure(name, root):
                for column, number in _numbers(row):
                    found[root][_subject(row), column].append(number)
    then, now = found[other], found[HERE]
    return [
        {
            "row": key[0],
            "measured": key[1],
            "then": _told(then[key]),
            "now": _told(now[key]),
            "worse": "yes" if min(now[key]) > max(then[key]) else "",
        }
        for key in now
        if key in then
    ]


def _measure(name: str, root: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--print", name, "--quick"],
        cwd=root,
        env={**os.environ, **_NEUTRAL, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(_MARK))
    rows: list[dict[str, Any]] = json.loads(line.removeprefix(_MARK))["rows"]
    return rows


def _subject(row: dict[str, Any]) -> str:
    return ", ".join(str(row[name]) for name in NAMES if row.get(name) not in (None, ""))


def _numbers(row: dict[str, Any]) -> list[tuple[str, float]]:
    found = []
    for column in MEASURES:
        if (text := row.get(column)) is None:
            continue
        number = re.match(r"\+?-?[\d.,]+", str(text))
        if number:
            found.append((column, float(number.group().replace(",", ""))))
    return found


def _told(numbers: list[float]) -> str:
    ordered = sorted(numbers)
    return f"{ordered[len(ordered) // 2]:.4g} [{ordered[0]:.4g}–{ordered[-1]:.4g}]"


if __name__ == "__main__":
    sys.exit(main())
