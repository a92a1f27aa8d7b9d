"""Every question that the page asks, answered for a recorded run and checked against the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.wire import unpack

import torchtap as tt
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import answer


@pytest.fixture(scope="module")
def catalog(run_folder: Path, other_folder: Path) -> Catalog:
    return Catalog.open([run_folder, other_folder])


def ask(catalog: Catalog, question: str, **parameters: Any) -> Any:
    return json.loads(answer(catalog, question, {k: str(v) for k, v in parameters.items()}))


def ask_packed(catalog: Catalog, question: str, **parameters: Any) -> Any:
    return unpack(answer(catalog, question, {k: str(v) for k, v in parameters.items()}))


def test_runs_are_listed_with_how_far_they_came(catalog: Catalog) -> None:
    runs = ask(catalog, "runs")["runs"]
    assert [run["name"] for run in runs] == ["first", "second"]
    assert (runs[0]["steps"], runs[0]["last"], runs[0]["status"]) == (30, 29, "closed")


def test_sites_come_in_execution_order_with_shape_class_and_source(catalog: Catalog) -> None:
    about = ask(catalog, "about")
    outputs = [site["name"] for site in about["sites"] if site["kind"] == "output"]
    assert outputs.index("blocks.0.attn.qkv:output") < outputs.index("blocks.0.attn:output")
    assert outputs[-1] == ":output"
    site = next(s for s in about["sites"] if s["name"] == "blocks.0.attn.qkv:output")
    assert (site["class"], site["shape"], site["dtype"]) == ("Linear", [8, 12, 96], "float32")
    assert about["model"]["children"][0]["class"] == "Embedding"
    own = next(s for s in about["sites"] if s["name"] == "blocks.0.mlp:output")
    assert own["source"].rpartition(":")[0].endswith("recordings.py")


def test_the_map_is_what_the_reader_says(catalog: Catalog, run_folder: Path) -> None:
    facts, arrays = ask_packed(catalog, "map", statistic="std", kind="output")
    about = ask(catalog, "about")
    names = facts["sites"]
    assert facts["rows"] == len(names) == len([s for s in about["sites"] if s["kind"] == "output"])
    run = tt.open(run_folder)
    row = names.index("blocks.1.mlp:output")
    series = run.series("blocks.1.mlp:output", "std")
    np.testing.assert_allclose(arrays["low"][row], series.values, rtol=1e-6)
    assert arrays["steps"].tolist() == series.steps.tolist()


def test_a_part_of_the_map_has_only_its_steps_and_rows(catalog: Catalog) -> None:
    whole, full = ask_packed(catalog, "map", statistic="std", kind="output")
    window = {"from": 5, "to": 9, "top": 2, "bottom": 6}
    facts, arrays = ask_packed(catalog, "map", statistic="std", kind="output", **window)
    assert arrays["steps"].tolist() == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(arrays["low"], full["low"][2:6, 5:10])
    assert facts["rows"] == whole["rows"]


def test_steps_of_nothing_but_nan_stay_in_the_map(catalog: Catalog) -> None:
    _, arrays = ask_packed(catalog, "map", statistic="rms", kind="output", under="head")
    assert arrays["steps"].tolist() == list(range(30))
    assert np.isnan(arrays["low"][0, 25])


def test_a_derived_ratio_is_gradient_norm_over_weight_norm(catalog: Catalog, run_folder: Path) -> None:
    facts, arrays = ask_packed(catalog, "map", statistic="grad/weight", kind="param_grad", under="head")
    run = tt.open(run_folder)
    with np.errstate(invalid="ignore"):  # nothing over nothing, once all is NaN
        expected = (
            run.series("head:param_grad.weight", "l2").values / run.series("head:param.weight", "l2").values
        )
    expected[run.series("head:param_grad.weight", "nans").values > 0] = np.nan
    np.testing.assert_allclose(arrays["low"][0], expected, rtol=1e-5)
    assert facts["shownRows"] == 1


def test_a_series_has_every_step_where_it_fits(catalog: Catalog, run_folder: Path) -> None:
    facts, arrays = ask_packed(catalog, "series", site="blocks.0:output", statistics="mean,std,nonsense")
    assert facts["statistics"] == ["mean", "std"]
    series = tt.open(run_folder).series("blocks.0:output", "std")
    np.testing.assert_array_equal(arrays["s1"], series.values)
    assert arrays["steps"].tolist() == series.steps.tolist()


def test_histograms_hold_every_value_once(catalog: Catalog) -> None:
    facts, arrays = ask_packed(catalog, "histograms", site="blocks.0.mlp.down:output")
    assert facts["total"] == 30
    assert arrays["density"].shape == (len(arrays["steps"]), len(arrays["edges"]) - 1)
    widths = np.diff(arrays["edges"])
    np.testing.assert_allclose((arrays["density"][:20] * widths).sum(axis=1), 1.0, rtol=0.01)
    assert (arrays["beyond"][:20] <= 0.01 * 8 * 12 * 32).all()
    facts, arrays = ask_packed(catalog, "histograms", site="blocks.0.mlp.down:output", axis="recorded")
    np.testing.assert_allclose(arrays["density"][:20].sum(axis=1), 8 * 12 * 32, rtol=0.02)


def test_every_slice_of_a_tensor_is_the_stored_one(catalog: Catalog, run_folder: Path) -> None:
    stored = tt.open(run_folder).tensor("blocks.0.attn:attention", step=5).numpy()
    site = {"site": "blocks.0.attn:attention", "step": 5}
    facts, arrays = ask_packed(catalog, "slice", **site, index="3,2,0,0")
    assert facts["exact"]
    np.testing.assert_array_equal(arrays["low"][0], stored[3, 2])
    _, arrays = ask_packed(catalog, "slice", **site, index="0,0,4,7", down=1, across=0)
    np.testing.assert_array_equal(arrays["low"][0], stored[:, :, 4, 7].T)
    _, arrays = ask_packed(catalog, "slice", **site, index="1", stack=1)
    np.testing.assert_array_equal(arrays["low"], stored[1])
    window = {"top": 2, "bottom": 5, "left": 1, "right": 9}
    _, arrays = ask_packed(catalog, "slice", **site, **window)
    np.testing.assert_array_equal(arrays["low"][0], stored[0, 0, 2:5, 1:9])


def test_a_large_slice_keeps_the_extremes_of_each_cell(catalog: Catalog, run_folder: Path) -> None:
    stored = tt.open(run_folder).tensor("blocks.0:output", step=0).numpy()[0]
    facts, arrays = ask_packed(catalog, "slice", site="blocks.0:output", step=0, size=4)
    assert not facts["exact"]
    assert arrays["low"].shape == (1, 4, 4)
    assert arrays["high"][0, 0, 0] == stored[:3, :8].max()
    assert arrays["low"][0, 0, 0] == stored[:3, :8].min()


def test_tokens_of_the_run_label_its_attention(catalog: Catalog) -> None:
    assert ask(catalog, "tokens", step=5)["tokens"][:3] == ["the", "tap", "opens"]
    assert ask(catalog, "tokens", run="second", step=5)["tokens"] is not None


def test_findings_mark_the_origin_and_where_it_went(catalog: Catalog) -> None:
    found = ask(catalog, "findings")
    first = found["findings"][0]
    assert (first["kind"], first["step"], first["site"]) == ("nonfinite", 24, "blocks.1.mlp.down:output")
    assert found["marks"]["blocks.1.mlp.down:output"] == "nan"
    assert found["marks"][":output"] == "spread"


def test_coverage_says_why_something_never_came(catalog: Catalog) -> None:
    coverage = ask(catalog, "coverage")
    reasons = {each["site"]: each["reason"] for each in coverage["missing"]}
    assert reasons["blocks:output"].startswith("a ModuleList has no forward")
    assert coverage["planned"] > len(coverage["missing"])


def test_two_runs_are_compared_along_depth(catalog: Catalog) -> None:
    result = ask(catalog, "comparison", a="first", b="second")
    assert result["first"]["site"] in {row["site"] for row in result["rows"]}
    assert result["verdict"]


@pytest.mark.parametrize(
    ("question", "parameters"),
    [
        ("map", {"statistic": "nonsense"}),
        ("map", {"statistic": "std", "from": "x"}),
        ("map", {"statistic": "std", "rows": "99999999"}),
        ("series", {}),
        ("series", {"site": "no such", "statistics": "std"}),
        ("slice", {"site": "blocks.0:output", "step": "0", "down": "9"}),
        ("slice", {"site": "blocks.0:output", "step": "0", "down": "1", "across": "1"}),
        ("slice", {"site": "blocks.0:output", "step": "0", "index": "99"}),
        ("slice", {"site": "blocks.0:output", "step": "0", "index": "-1"}),
        ("about", {"run": "no such run"}),
        ("../../etc/passwd", {}),
    ],
)
def test_a_malformed_question_is_refused_with_a_reason(
    catalog: Catalog, question: str, parameters: dict[str, str]
) -> None:
    with pytest.raises(Refused, match=r"\w+ \w+"):
        answer(catalog, question, parameters)
