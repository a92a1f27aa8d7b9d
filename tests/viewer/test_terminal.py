from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from rich.console import Console

import torchtap as tt
from torchtap.cli.tail import command as tail
from torchtap.viewer.terminal import findings_text, live_view, sparkline


def test_a_sparkline_shows_a_single_spike_and_what_is_not_finite() -> None:
    values = np.ones(1000)
    values[500] = 9.0
    line = sparkline(values, 20)
    assert len(line) == 20
    assert line.count("█") == 1
    assert "×" in sparkline([1.0, 2.0, float("nan")], 3)
    assert sparkline([]) == ""
    assert sparkline([float("nan")] * 3) == "×××"


def test_one_screen_has_progress_numbers_and_findings(run_folder: Path) -> None:
    run = tt.open(run_folder)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(live_view(run, rows=6, findings=tt.diagnose(run)))
    text = console.export_text()
    assert "step 29" in text
    assert "\nloss " in text
    assert ":value.loss" not in text
    assert "further sites" in text
    assert "blocks.1.mlp.down:output" in text


def test_markup_in_a_finding_is_text(run_folder: Path) -> None:
    finding = tt.Finding("dead", "warning", "[bold]x", 1, 0.0, "[red]dead[/red]", "", ("[bold]x",))
    assert findings_text([finding]).plain == "● [red]dead[/red]\n"


def test_tail_looks_once_without_torch(run_folder: Path) -> None:
    shown = CliRunner().invoke(tail, [str(run_folder), "--once", "--site", "blocks.*:output"])
    assert shown.exit_code == 0
    assert "blocks.0:output" in shown.output
    program = (
        "import sys; from torchtap.cli.tail import command; "
        f"command([{str(run_folder)!r}, '--once'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_tail_of_a_finished_run_without_a_terminal_lists_its_steps_and_ends(run_folder: Path) -> None:
    shown = CliRunner().invoke(tail, [str(run_folder)])
    assert shown.exit_code == 0
    assert "step 0\n" in shown.output
    assert "step 29\n" in shown.output


def test_show_begins_with_what_was_logged_and_fills_the_width(run_folder: Path) -> None:
    from torchtap.cli.show import command as show

    for width in (80, 160):
        shown = CliRunner().invoke(show, [str(run_folder), "--rows", "5"], env={"COLUMNS": str(width)})
        lines = shown.output.splitlines()
        assert max(map(len, lines)) <= width
        rows = [line for line in lines if line.startswith("│")]
        assert rows[0].split("│")[1].strip() == "loss"
        assert rows[0].split("│")[2].strip() == "nan"
        spark = rows[0].rstrip("│ ").rpartition("│")[2].strip()
        assert len(spark) >= min(30, width - 70)


def test_the_norm_of_nothing_but_nan_is_nan(run_folder: Path) -> None:
    shown = CliRunner().invoke(
        tail, [str(run_folder), "--once", "--site", "head:output"], env={"COLUMNS": "120"}
    )
    row = next(line for line in shown.output.splitlines() if line.startswith("head:output"))
    assert row.split()[4] == "nan"
