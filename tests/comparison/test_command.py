"""``torchtap compare``: its exit codes, its outputs, and no traceback whatever it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from torchtap.cli import main
from torchtap.cli.compare import command


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    layers = [torch.randn(2, 5, 8) for _ in range(5)]
    for name, factor in (("a", 1.0), ("same", 1.0), ("off", 1.01)):
        (tmp_path / name).mkdir()
        for n, layer in enumerate(layers):
            file = "embedding_output.pt" if n == 0 else f"layer_{n}_output.pt"
            torch.save(layer * (factor if n >= 3 else 1.0), tmp_path / name / file)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_agreement_is_zero(folders: Path) -> None:
    result = run(folders / "a", folders / "same")
    assert result.exit_code == 0
    assert "No divergence" in result.output


def test_divergence_is_one_and_the_table_shows_it(folders: Path) -> None:
    result = run(folders / "a", folders / "off")
    assert result.exit_code == 1
    assert "layer_3:output" in result.output
    assert "first" in result.output


def test_machine_output_has_rows_first_and_verdict(folders: Path) -> None:
    result = run(folders / "a", folders / "off", "--json", "-")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["first"]["site"] == "layer_3:output"
    assert [row["status"] for row in data["rows"]] == ["equal"] * 3 + ["diverged"] * 2
    assert data["verdict"]


def test_files_are_written_and_quiet_prints_one_line(folders: Path, tmp_path: Path) -> None:
    result = run(
        folders / "a",
        folders / "off",
        "--quiet",
        "--html",
        tmp_path / "r.html",
        "--json",
        tmp_path / "r.json",
    )
    assert result.output.count("\n") == 1
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "r.json").read_text())["diverged"] is True


def test_a_repeat_and_rules_are_taken(folders: Path) -> None:
    assert run(folders / "a", folders / "off", "--repeat", folders / "off").exit_code == 0
    assert run(folders / "a", folders / "same", "--map", "layer_0=layer_0").exit_code == 0


@pytest.mark.parametrize("broken", ["missing", "empty", "file", "bad-rule", "damaged-run"])
def test_an_error_is_two_without_a_traceback(
    folders: Path, broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target, extra = folders / broken, []
    if broken == "empty":
        target.mkdir()
    elif broken == "file":
        target.write_text("x")
    elif broken == "bad-rule":
        target, extra = folders / "same", ["--map", "nonsense"]
    elif broken == "damaged-run":
        (target / "rank-00000" / "attempt-0000").mkdir(parents=True)
        (target / "rank-00000" / "attempt-0000" / "manifest.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(folders / "a"), str(target), *extra])
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith("torchtap: ")
    assert "Traceback" not in error
    assert "bug" not in error


@pytest.mark.parametrize("broken", ["one layer", "junk", "junk among good", "no tensor", "cut"])
def test_what_is_missing_or_unreadable_is_three_with_the_number(folders: Path, broken: str) -> None:
    target = folders / "same"
    if broken == "one layer":
        for n in (1, 2, 4):
            (target / f"layer_{n}_output.pt").unlink()
    elif broken == "junk":
        for file in target.iterdir():
            file.write_bytes(b"garbage")
    elif broken == "junk among good":
        (target / "layer_2_output.pt").write_bytes(b"garbage")
    elif broken == "no tensor":
        torch.save({"not": "a tensor"}, target / "layer_2_output.pt")
    elif broken == "cut":
        data = (target / "layer_2_output.pt").read_bytes()
        (target / "layer_2_output.pt").write_bytes(data[: len(data) // 2])
    result = run(folders / "a", target)
    assert result.exit_code == 3, result.output
    assert "of 5 sites" in result.output
    assert "Cannot tell" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_another_shape_is_one(folders: Path) -> None:
    torch.save(torch.zeros(7), folders / "same" / "layer_2_output.pt")
    result = run(folders / "a", folders / "same")
    assert result.exit_code == 1
    assert "layer_2" in result.output


def test_the_alignment_is_explained(folders: Path) -> None:
    result = run(folders / "a", folders / "same", "--quiet", "--explain-alignment")
    assert "layer_3:output = layer_3:output: name" in result.output
