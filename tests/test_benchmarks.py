"""The benchmarks' own arithmetic, with a clock that only work moves; no test measures time."""

from __future__ import annotations

import ast
from pathlib import Path

import benchmarks.__main__ as writing
import pytest
from benchmarks.__main__ import TABLES
from benchmarks.timing import Ratio, case, compare, quartiles, table

_FOLDER = Path(__file__).parent.parent / "benchmarks"


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_a_ratio_is_that_of_neighbours() -> None:
    clock, rounds = _Clock(), iter(range(1000))

    def drifting(factor: float) -> None:
        # The machine gets slower and slower; neighbours meet it alike.
        clock.work(factor * (1 + next(rounds) // 2))

    measured = compare(
        {"plain": case(lambda: drifting(1.0)), "twice": case(lambda: drifting(2.0))},
        base="plain",
        rounds=9,
        warm_up=0,
        clock=clock,
    )
    assert measured["twice"].ratio == 2.0
    assert measured["plain"].ratio == measured["plain"].low == measured["plain"].high == 1.0


def test_warming_up_and_entering_are_not_timed() -> None:
    clock, calls = _Clock(), iter([100.0, 1.0, 1.0])
    measured = compare(
        {"plain": case(lambda: clock.work(1.0)), "warm": case(lambda: clock.work(next(calls)))},
        base="plain",
        rounds=1,
        repeats=2,
        warm_up=1,
        clock=clock,
    )
    assert measured["warm"].seconds == measured["plain"].seconds == 1.0


def test_a_bar_within_the_noise_is_neither_held_nor_broken() -> None:
    quiet, noisy = Ratio(1.02, 1.019, 1.021, 1.0, 25), Ratio(1.02, 0.95, 1.09, 1.0, 25)
    assert quiet.verdict(1.03) == "yes"
    assert quiet.verdict(1.01) == "no"
    assert noisy.verdict(1.03) == noisy.verdict(1.01) == "undecided (± 0.052)"


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_a_table_is_markdown_with_one_line_a_row() -> None:
    lines = table([{"case": "a", "ms": 1234.5, "holds": True}, {"case": "b", "ms": 0.5, "holds": False}])
    assert lines.splitlines() == [
        "| case | ms | holds |",
        "| --- | --- | --- |",
        "| a | 1,234 | yes |",
        "| b | 0.5 | no |",
    ]


def test_a_table_that_is_measured_again_changes_nothing_else_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "RESULTS.md"
    monkeypatch.setattr(writing, "RESULTS", report)
    for name in ("kernel", "steps", "viewer"):
        writing._write(name, f"About {name}.\n\n| a |\n| --- |\n| 1 |", 1.0, quick=False)
    once = report.read_text(encoding="utf-8")
    for name in ("viewer", "kernel"):
        writing._write(name, f"About {name}.\n\n| a |\n| --- |\n| 1 |", 1.0, quick=False)
    assert report.read_text(encoding="utf-8") == once
    assert "\n\n\n" not in once


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_file_that_says_what_it_measures_and_can_be_run(name: str) -> None:
    tree = ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)
