"""How things show themselves in a notebook and as figures: static, escaped, small."""

from __future__ import annotations

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
from torchtap.viewer.figures import map_svg, series_svg, site_html


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


def test_a_site_and_a_series_show_their_lines(run_folder: Path) -> None:
    run = tt.open(run_folder)
    assert Checked(site_html(run, "blocks.0:output")).tags.count("polyline") >= 3
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


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>:output"
    with RunWriter(tmp_path / "<b>", manifest={}) as writer:
        block = ScalarBlock((name,), ("std", "nans"), np.array([[1.0, 2.0]]))
        writer.write(StepRecord(0, None, None, "train", 0.0, (block,), ()))
    run = tt.open(tmp_path / "<b>")
    Checked(run._repr_html_())
    Checked(site_html(run, name))


def test_empty_and_broken_numbers_draw_nothing_and_do_not_fail() -> None:
    assert map_svg(np.zeros((0, 5))) == ""
    Checked(map_svg(np.full((3, 4), np.nan)))
    Checked(series_svg([]))
    Checked(series_svg([float("nan"), float("inf")]))


def test_a_figure_of_few_sites_has_lines_and_of_many_a_map(run_folder: Path) -> None:
    need("matplotlib")
    run = tt.open(run_folder)
    few = run.plot(["blocks.0:output", "blocks.1:output"], "std")
    assert [line.get_label() for line in few.axes[0].lines] == ["blocks.0:output", "blocks.1:output"]
    np.testing.assert_array_equal(few.axes[0].lines[0].get_xdata()[:3], [0, 1, 2])
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
