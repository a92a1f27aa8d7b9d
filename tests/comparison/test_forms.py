"""One model in several forms, each beside the model as it is, in one table."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import torchtap as tt


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()


def test_every_form_has_a_line(model: nn.Module, tmp_path: Path) -> None:
    found = tt.compare_forms(
        model, (torch.randn(3, 16),), ["eager", "script", "trace", "export", "bf16", "int8"]
    )
    assert [row.form for row in found.rows] == ["eager", "script", "trace", "export", "bf16", "int8"]
    for form in ("eager", "script", "trace", "export", "bf16"):
        result = found[form].comparison
        assert result is not None, found[form].problem
        assert result.first is None, f"{form}: {result.verdict}"
        assert ":output" in {row.site for row in result.rows}
    rounded = found["int8"].comparison
    assert rounded is not None
    assert rounded.outcome == "same"
    assert "quantizer's step" in rounded.basis
    error = found["int8"].output_error
    assert error is not None
    assert 1e-4 < error < 0.1
    with (tmp_path / "table").open("w") as file:
        Console(width=200, file=file).print(found.table())
    assert "int8" in (tmp_path / "table").read_text()
    assert "int8" in str(found)
    assert "FormRow(" not in str(found)
    assert "0:output" in str(rounded.table())


def test_a_lower_precision_says_what_it_costs(model: nn.Module) -> None:
    x = torch.randn(3, 16)
    row = tt.compare_forms(model, (x,), ["bf16"])["bf16"]
    assert row.comparison is not None
    assert "in bfloat16, in which the reference was run too" in row.comparison.verdict
    narrow = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        first = (narrow[0](x.bfloat16()).float() - model[0](x)).norm() / model[0](x).norm()
        last = (narrow(x.bfloat16()).float() - model(x)).norm() / model(x).norm()
    assert row.output_error == pytest.approx(last.item(), rel=1e-3)
    assert row.comparison.facts["precision"] == "bfloat16"
    assert row.comparison.facts["from_full_precision"]["0:output"] == pytest.approx(first.item(), rel=1e-3)


def test_a_form_that_cannot_be_made_says_why() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * len([name for name in globals() if name])

    found = tt.compare_forms(Stubborn(), (torch.ones(2),), ["eager", "script"])
    assert found["script"].comparison is None
    assert "could not be made" in found["script"].problem


def test_an_unknown_form_is_refused(model: nn.Module) -> None:
    with pytest.raises(tt.CompareError, match="known are"):
        tt.compare_forms(model, (torch.ones(1, 16),), ["onnx"])
