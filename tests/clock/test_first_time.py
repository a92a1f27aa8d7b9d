"""What a user writes the first time means what it says, and what is odd is told once."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from tests.clock.truth import Kept
from torch import nn

import torchtap as tt
from torchtap.errors import PlanError, SelectionError
from torchtap.plan.plan import Plan
from torchtap.reduce import Histogram, Stats


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 2)))


def test_the_full_path_of_a_module_means_that_module_alone() -> None:
    model = nested()
    with tt.capture(model, "0:output") as seen:
        model(torch.ones(1, 3))
    assert list(seen) == ["0:output"]
    with tt.capture(model, "*.0:output") as seen:
        model(torch.ones(1, 3))
    assert list(seen) == ["0.0:output", "1.0:output"]
    with tt.edit(model, {"0:output": 0.0}) as edited:
        model(torch.ones(1, 3))
    assert list(edited.applied) == ["0:output"]


def test_an_edit_of_several_places_needs_a_wildcard() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.ReLU()}), "b": nn.ModuleDict({"x": nn.ReLU()})})
    with pytest.raises(PlanError, match=r"'x:output' picks 2 places: a.x:output, b.x:output"):
        tt.edit(model, {"x:output": 0.0})
    tt.edit(model, {"**.x:output": 0.0})


def test_a_watch_takes_keep_and_every_for_bare_selectors(tmp_path: Path) -> None:
    model = nested()
    with tt.watch(model, tmp_path, ["0", "1"], every=2, keep=[Stats(), Histogram()]) as watch:
        for _ in range(4):
            with watch.step():
                model(torch.ones(1, 3))
                watch.log(loss=0.5)
    run = tt.open(tmp_path)
    assert run.series("0", "count").steps.tolist() == [0, 2]
    assert run.histogram("1:output", step=2).counts.sum() == 2
    assert run.series("loss").values.tolist() == [0.5] * 4
    with pytest.raises(SelectionError, match="several statistics"):
        run.series("0")
    with pytest.raises(PlanError, match="a tap has its own"):
        tt.watch(model, None, tt.tap("0"), every=3)


def test_one_tap_with_two_reductions_makes_two_taps() -> None:
    model, kept = nested(), Kept()
    with (
        tt.watch(model, None, [tt.tap("0", keep=[Stats(), Histogram()], every=2)], sinks=[kept]) as watch,
        watch.step(),
    ):
        model(torch.ones(1, 3))
    assert len(watch.plan.asked) == 2
    assert kept.records[0].scalars
    assert kept.records[0].tensors


def test_a_module_stands_for_its_output_and_a_foreign_one_is_told() -> None:
    model = nested()
    with tt.capture(model, "*:output") as seen:
        model(torch.ones(1, 3))
    assert torch.equal(seen[model[0][0]], seen["0.0:output"])  # type: ignore[index]
    with pytest.raises(SelectionError, match="not a module of the model"):
        seen[nn.Linear(1, 1)]
    with pytest.raises(SelectionError, match="none of this model's 6 modules"):
        tt.capture(model, nn.Linear(1, 1))


def test_a_capture_that_is_not_entered_says_so() -> None:
    with pytest.raises(tt.SessionError, match=r"with tt\.capture"):
        tt.capture(nested(), "0")["0:output"]


def test_a_capture_warns_of_what_never_came() -> None:
    model = nested()
    with pytest.warns(RuntimeWarning, match="nothing came from '0:grad_output': no backward"):
        with tt.capture(model, "0:output", "0:grad_output"):
            model(torch.ones(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tt.capture(model, "*:output"):
            model[0](torch.ones(1, 3))  # type: ignore[index]


def test_a_warning_stands_at_the_users_line() -> None:
    model = nested()
    with pytest.warns(RuntimeWarning) as told, tt.capture(model, "0:grad_output"):
        model(torch.ones(1, 3))
    watch = tt.watch(model, None, tt.tap("0:output", every=5, offset=3))
    with pytest.warns(RuntimeWarning, match="recorded nothing") as closing:
        watch.close()
    with pytest.warns(RuntimeWarning, match="nothing moves the clock") as passing:
        with tt.watch(model, None, "0:output"):
            model(torch.ones(1, 3))
            model(torch.ones(1, 3))  # told by a hook that torch calls
    assert {warning.filename for warning in (*told, *closing, *passing)} == {__file__}


def test_a_capture_says_why_no_named_value_and_no_attention_came() -> None:
    model = nested()
    with pytest.warns(RuntimeWarning, match=r"nothing came from '\*:value.router': no torchtap.emit\(\)"):
        with tt.capture(model, "*:value.router"):
            model(torch.ones(1, 3))
    with pytest.warns(RuntimeWarning, match=r"nothing came from '\*:attention': no "):
        with tt.capture(model, "*:attention"):
            model(torch.ones(1, 3))


def test_a_watch_without_a_clock_hints_at_the_second_pass_and_once() -> None:
    model = nested()
    with tt.watch(model, None, "*:output") as watch:
        model(torch.ones(1, 3))
        assert "no clock" in repr(watch)
        with pytest.warns(RuntimeWarning, match="nothing moves the clock") as caught:
            for _ in range(3):
                model(torch.ones(1, 3))
    assert len(caught) == 1
    assert "closed" in repr(watch)


def test_an_empty_watch_and_late_gradients_are_told() -> None:
    model = nested()
    with pytest.warns(RuntimeWarning, match="recorded nothing"):
        tt.watch(model, None, "*:output").close()
    with pytest.warns(RuntimeWarning, match="came after their step was over"):
        with tt.watch(model, None, ["*:output", "*:grad_output"]) as watch:
            with watch.step():
                loss = model(torch.ones(1, 3)).sum()
            with watch.step():
                loss.backward()


def test_a_plan_is_written_to_json_and_read_back_and_taken_by_capture_watch_and_instrument() -> None:
    model = nested()
    plan = tt.make_plan(
        model,
        [
            tt.tap("*:output", every=3, phase="train"),
            tt.tap(
                ["0.0:param", "re:1.*:param_grad.*"],
                Histogram(bins=8, range=(-1, 1)),
                steps=range(0, 9, 2),
                exclude="0.1",
            ),
            tt.tap("0.0", tt.Full(dtype="float16"), epochs=[1], batches=[0], alias="first"),
            tt.tap("1", tt.Full(), first=3, budget=tt.Budget(bytes=1000)),
        ],
    )
    text = plan.to_json()
    other = Plan.from_json(text, model)
    assert json.loads(other.to_json()) == json.loads(text)
    assert [port.site.name for port in other.ports] == [port.site.name for port in plan.ports]
    whole = tt.make_plan(model, ["0", "1"])
    with tt.capture(model, whole) as seen:
        model(torch.ones(1, 3))
    assert list(seen) == ["0:output", "1:output"]
    kept = Kept()
    with tt.watch(model, None, whole, sinks=[kept]) as watch, watch.step():
        model(torch.ones(1, 3))
    assert [item.site for item in kept.records[0].tensors] == ["0:output", "1:output"]
    tt.instrument(model, whole)


@pytest.mark.parametrize("text", ["", "{}", '{"taps": [{"selectors": ["0"]}]}', "[1]"])
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not the JSON of a plan"):
        Plan.from_json(text, nested())


def test_a_plan_of_functions_cannot_be_read_back() -> None:
    text = tt.make_plan(nested(), [tt.tap("*:output", when=lambda moment: True)]).to_json()
    with pytest.raises(PlanError, match="a file does not hold it"):
        Plan.from_json(text, nested())


def test_a_path_without_a_kind_means_the_output_of_stored_tensors_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        tt.watch(model, tmp_path / "run", "0:output", keep=[tt.Full(), tt.Histogram()]) as watch,
        watch.step(),
    ):
        out = model(torch.ones(2, 4))
    run = tt.open(tmp_path / "run")
    assert torch.equal(run.tensor("0"), out)
    assert run.histogram("0").counts.sum() == 8


@pytest.mark.parametrize("name", ["TensorBoardSink", "JsonLinesSink"])
def test_a_sink_tells_of_a_statistic_that_does_not_exist(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sink = getattr(tt.sinks, name)(tmp_path / "numbers", statistics=["stdd"])
    with pytest.warns(RuntimeWarning, match=f"{name} selects statistic 'stdd'"):
        with tt.watch(model, None, "0:output", sinks=[sink]) as watch, watch.step():
            model(torch.ones(2, 4))
