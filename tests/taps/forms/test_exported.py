"""torch.export, AOTInductor and extra outputs, beyond what the matrix holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.optional import need
from tests.taps.forms.making import FORMS, saved_program
from tests.taps.forms.structures import Repeated, UsesDict, UsesTensor
from torch import nn

import torchtap as tt


def test_an_exported_program_itself_is_tapped_through_the_modules_it_gives() -> None:
    model, x = Repeated(), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    with tt.capture(model, "*:output") as eager:
        model(x)
    with tt.capture(program, "*:output") as seen:
        program.module()(x)
    assert set(seen) == set(eager)
    assert "made:output#2" in seen
    assert "module" not in program.__dict__


def test_dynamic_shapes_stay_dynamic() -> None:
    model = UsesTensor().eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    for program in (
        torch.export.export(
            tt.instrument(model, "*:output"), (torch.randn(3, 4),), dynamic_shapes={"x": {0: rows}}
        ),
        tt.instrument(
            torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: rows}}), "*:output"
        ),
    ):
        call = saved_program(program).module()
        x = torch.randn(11, 4)
        with tt.capture(call, "*:output") as seen:
            call(x)
        assert torch.equal(seen["made.linear:output"], model.made.linear(x))


def test_a_program_made_elsewhere_can_be_given_taps_and_saved_again() -> None:
    model, x = UsesDict(), torch.randn(3, 4)
    elsewhere = saved_program(torch.export.export(model, (x,)))
    tapped = saved_program(tt.instrument(elsewhere, "*:output", "*:input"))
    untouched = [str(node.target) for node in elsewhere.graph.nodes]
    assert not any("torchtap" in target for target in untouched)
    for call in (tapped.module(), tapped.run_decompositions().module()):
        with tt.capture(call, "made.linear:output", ":input", ":output") as seen:
            output = call(x)
        assert torch.equal(seen[":input"], x)
        assert torch.equal(seen[":output"], output)
        torch.testing.assert_close(seen["made.linear:output"], model.made.linear(x))


def test_what_tracing_took_out_is_told_in_the_coverage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2))
    call = torch.export.export(model, (torch.randn(3, 4),)).module()
    with pytest.raises(tt.SelectionError):
        tt.capture(call, "1:output")  # nothing of it is in the program
    tapped = torch.export.export(tt.instrument(model, "*:output"), (torch.randn(3, 4),)).module()
    with tt.capture(tapped, "*:output") as seen:
        tapped(torch.randn(3, 4))
    assert "1:output" in seen


def test_a_package_compiled_ahead_of_time_reports_to_the_session_and_is_silent_without(
    tmp_path: Path,
) -> None:
    model, x = UsesTensor().eval(), torch.randn(3, 4)
    with tt.capture(model, "*:output") as eager:
        expected = model(x)
    with torch.no_grad():
        program = torch.export.export(tt.instrument(model, "*:output"), (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    call = tt.load(path, unsafe=True)
    torch.testing.assert_close(call(x), expected)
    with tt.capture(call, "*:output") as seen:
        call(x)
    assert set(seen) == set(eager)
    for name in eager:
        torch.testing.assert_close(seen[name], eager[name])
    with tt.capture(call, "made:input", "made:output") as seen:
        call(x)
    assert [(m.site, "not among the sites" in m.reason) for m in seen.coverage()] == [("made:input", True)]
    with pytest.raises(tt.FormError, match=r"tt\.load"):
        tt.capture(torch._inductor.aoti_load_package(path))


def test_an_onnx_file_with_extra_outputs_keeps_the_signature_and_feeds_the_session(tmp_path: Path) -> None:
    need("onnxruntime")

    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = UsesTensor()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.made(x)
            return {"y": y, "twice": 2 * y}

    model, x = Answer().eval(), torch.randn(3, 4)
    with tt.capture(model, "*:output", "*:input") as eager:
        expected = model(x)
    extra = tt.extra_outputs(model, "*:output", "*:input", args=(x,))
    extra.to_onnx(tmp_path / "model.onnx", (x,))
    call = tt.load(tmp_path / "model.onnx")
    with tt.capture(call, "*:output", "*:input") as seen:
        output = call(x)
    assert list(output) == ["y", "twice"]
    torch.testing.assert_close(output, expected)
    assert set(seen) == set(eager)
    for name in eager:
        torch.testing.assert_close(seen[name], eager[name])


@pytest.mark.parametrize(
    "form", ["script, only loaded", "FX", "export, only loaded", "extra outputs, traced"]
)
def test_a_watch_records_a_form_into_a_run_like_any_other_model(form: str, tmp_path: Path) -> None:
    model, x = UsesTensor(), torch.randn(3, 4)
    subject = FORMS[form](model, x)
    taps = [tt.tap("*:output", every=2), tt.tap("head:output", keep=tt.Full(), steps=[2])]
    with tt.watch(subject, tmp_path / "run", taps) as watch:
        for _ in range(3):
            with watch.step():
                output = subject(x)
    run = tt.open(tmp_path / "run")
    assert list(run.series("made.linear:output", "mean").steps) == [0, 2]
    assert torch.equal(run.tensor("head:output", 2), output.detach())
    missing = run.coverage()["missing"]
    if form in ("FX", "export, only loaded"):  # a graph cannot tell that nothing was forgotten
        assert [(each["site"], "does not know it" in each["reason"]) for each in missing] == [
            ("*:output", True)
        ]
    else:
        assert missing == []
    assert {site["name"] for site in run.manifest["sites"]} >= {":output", "made:output", "made.norm:output"}
