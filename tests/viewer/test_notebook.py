"""How things show themselves in a notebook and as figures: static, escaped, small."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.optional import need

import torchtap as tt
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.arrays import NOT_FINITE, css, sequential
from torchtap.viewer.figures import map_svg, series_svg


class Checked(HTMLParser):
    """Counts tags, and fails on anything that would run or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "link", "object")
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_run_shows_its_map_and_its_findings(run_folder: Path) -> None:
    text = tt.open(run_folder)._repr_html_()
    page = Checked(text)
    assert page.tags.count("rect") > 40
    assert "blocks.1.mlp.down:output" in text
    assert len(text) < 400_000
    drawn = text.partition("<svg")[2]
    assert "embed:output</text>" in drawn  # rows have names
    assert "step 0</text>" in drawn
    assert f"fill='{NOT_FINITE}'" in drawn  # from step 24 on


def test_what_is_not_finite_is_red_and_what_is_missing_is_not() -> None:
    values = np.array([[1.0, np.nan, np.inf, np.nan]])
    broken = np.array([[False, True, False, False]])
    text = map_svg(values, broken=broken)
    assert text.count(NOT_FINITE) == 1  # two neighbours, one rectangle
    assert "#8884" in text


def test_a_series_shows_its_line(run_folder: Path) -> None:
    run = tt.open(run_folder)
    assert Checked(run.series("blocks.0:output", "std")._repr_html_()).tags.count("polyline") == 1


def test_a_look_inside_shows_shapes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    with tt.capture(model, "*:output") as seen:
        model(torch.ones(2, 3))
    text = seen._repr_html_()
    Checked(text)
    assert "2×5" in text
    assert "0:output" in text


def test_a_comparison_shows_its_verdict_and_error_along_depth(run_folder: Path, other_folder: Path) -> None:
    result = tt.compare(run_folder, other_folder)
    text = result._repr_html_()
    assert Checked(text).tags.count("polyline") == 1
    assert "stroke-dasharray" in text


def test_findings_are_short_as_text_and_whole_as_html(run_folder: Path) -> None:
    found = tt.diagnose(run_folder)
    assert len(repr(found)) < 4000
    assert found[0].message in repr(found)
    text = found._repr_html_()
    Checked(text)
    assert "blocks.1.mlp" in text
    assert str(found.summary())[:20] in text


def test_a_captured_nan_is_counted() -> None:
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 1, torch.nan, x)

    model = torch.nn.Sequential(Breaks())
    with tt.capture(model, "*:output") as seen:
        model(torch.tensor([1.0, 2.0, 3.0]))
    assert "2 NaN or inf" in seen._repr_html_()
    assert "largest magnitude 1" in seen._repr_html_()


_CELLS = [
    "import torch, torchtap as tt",
    "run = tt.open(FOLDER)\nrun",
    "tt.diagnose(run)",
    "run.plot(['blocks.0:output', 'blocks.1:output'], 'std')",
    "run.plot(kind='output')",
    "tt.compare(FOLDER, OTHER)",
    "model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())\n"
    "with tt.capture(model, '*:output') as seen:\n    model(torch.ones(2, 3))\nseen",
    "run.series('loss')",
]


def test_a_notebook_shows_every_result_as_a_picture_or_a_table(
    run_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    for name in ("nbclient", "ipykernel", "matplotlib"):
        need(name)
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell) for cell in _CELLS]
    cells.insert(0, nbformat.v4.new_code_cell(f"FOLDER, OTHER = {str(run_folder)!r}, {str(other_folder)!r}"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[out["data"] for out in cell.outputs if "data" in out] for cell in notebook.cells]
    run, findings, lines, heat_map, comparison, captured, series = (outs[0] for outs in shown[2:])
    for data, words in ((run, "steps"), (findings, "problem"), (captured, "2×5"), (comparison, "<svg")):
        assert words in data["text/html"]
    assert "<polyline" in series["text/html"]
    assert "image/png" in lines
    assert "image/png" in heat_map
    assert all(len(str(data.get("text/plain", ""))) < 5000 for outs in shown for data in outs)
    if folder := os.environ.get("TORCHTAP_NOTEBOOK"):  # to be looked at
        nbformat.write(notebook, Path(folder) / "shown.ipynb")


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>:output"
    with RunWriter(tmp_path / "<b>", manifest={}) as writer:
        block = ScalarBlock((name,), ("std", "nans"), np.array([[1.0, 2.0]]))
        writer.write(StepRecord(0, None, None, "train", 0.0, (block,), ()))
    run = tt.open(tmp_path / "<b>")
    Checked(run._repr_html_())


def test_empty_and_broken_numbers_draw_nothing_and_do_not_fail() -> None:
    assert map_svg(np.zeros((0, 5))) == ""
    Checked(map_svg(np.full((3, 4), np.nan)))
    Checked(series_svg([]))
    Checked(series_svg([float("nan"), float("inf")]))


def test_a_figure_of_few_sites_has_lines_and_of_many_a_map(run_folder: Path) -> None:
    need("matplotlib")
    run = tt.open(run_folder)
    few = run.plot(["blocks.0:output", "blocks.1:output"], "std")
    labels = [line.get_label() for line in few.axes[0].lines]
    assert labels == [f"blocks.{n}:output{more}" for n in (0, 1) for more in ("", ": NaN or inf")]
    line, crosses = few.axes[0].lines[:2]
    np.testing.assert_array_equal(line.get_xdata(), np.arange(30))  # a gap, not a bridge over the NaNs
    np.testing.assert_array_equal(np.isnan(line.get_ydata()), np.arange(30) >= 25)
    np.testing.assert_array_equal(crosses.get_xdata(), np.arange(25, 30))
    assert few._repr_png_().startswith(b"\x89PNG")
    many = tt.plot(run_folder, kind="grad_output", statistic="rms")
    assert many.axes[0].images[0].get_array().shape == (25, 30)
    with pytest.raises(tt.SelectionError, match="no such"):
        run.plot("no such")


def test_colours_rise_evenly_in_lightness_also_for_colour_blind_eyes() -> None:
    table = np.array(sequential()) / 255
    linear = np.where(table <= 0.04045, table / 12.92, ((table + 0.055) / 1.055) ** 2.4)
    # How a screen's colours look to eyes without one kind of cone (Viénot, Brettel and Mollon, 1999).
    blind = {
        "none": np.eye(3),
        "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    }
    for matrix in blind.values():
        luminance = np.clip(linear @ matrix.T, 0, 1) @ np.array([0.2126, 0.7152, 0.0722])
        assert (np.diff(luminance) > -0.004).all()
        assert (np.diff(luminance[::8]) > 0).all()
    assert css(-1) == css(0)
    assert css(2) == css(1)
