"""Findings on recorded numbers where the truth is known, and silence where all is well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchtap as tt
from torchtap.diagnosis.rules.values import dead
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")
STEPS = 40


def healthy(size: float = 1.0) -> dict[str, float]:
    return {
        "count": 100.0, "mean": 0.1 * size, "std": size, "min": -3 * size, "max": 3 * size, "absmax": 3 * size,
        "l1": 80 * size, "l2": 10 * size, "rms": size, "zeros": 0.0, "nans": 0.0, "infs": 0.0,
    }  # fmt: skip


def record(
    folder: Path, sites: dict[str, Any], *, classes: dict[str, str] | None = None, dtype: str = "float32"
) -> Path:
    """A run of ``sites``: each a function of the step to the statistics that differ from healthy ones."""
    names = tuple(sites)
    described = [
        {"name": name, "class": (classes or {}).get(name, "Linear"), "dtype": dtype, "shape": [10, 10]}
        for name in names
    ]
    with RunWriter(folder, manifest={"sites": described}) as writer:
        for step in range(STEPS):
            rows = [{**healthy(), **sites[name](step)} for name in names]
            values = np.array([[row[s] for s in STATISTICS] for row in rows])
            writer.write(
                StepRecord(
                    step, None, None, "train", float(step), (ScalarBlock(names, STATISTICS, values),), ()
                )
            )
    return folder


def fine(step: int) -> dict[str, float]:
    return {}


def test_a_training_that_goes_well_has_no_findings(tmp_path: Path) -> None:
    sites = dict.fromkeys(("a:output", "b:output", "a:grad_output", "a:param_grad.weight"), fine)
    assert tt.diagnose(record(tmp_path / "run", sites)) == []


def test_the_first_nan_is_the_earliest_step_and_at_it_the_earliest_computed_site(tmp_path: Path) -> None:
    def from_step(first: int) -> Any:
        return lambda step: {"nans": 5.0} if step >= first else {}

    sites = {
        "a:output": from_step(21),
        "b:output": from_step(20),
        "c:output": from_step(20),
        "a:grad_output": from_step(20),
        "c:grad_output": from_step(20),
        "a:param_grad.weight": from_step(20),
        "a:param.weight": from_step(21),
    }
    (finding,) = tt.diagnose(record(tmp_path / "run", sites))
    assert (finding.kind, finding.severity, finding.site, finding.step) == (
        "nonfinite",
        "error",
        "b:output",
        20,
    )
    assert finding.sites == (
        "b:output", "c:output", "c:grad_output", "a:grad_output", "a:param_grad.weight", "a:param.weight", "a:output",
    )  # fmt: skip
    assert "b:output" in str(finding)


def test_a_nan_that_appears_only_in_the_backward_is_traced_against_the_order_of_the_forward(
    tmp_path: Path,
) -> None:
    broken = lambda step: {"nans": 1.0} if step == 30 else {}  # noqa: E731
    sites = {"a:output": fine, "b:output": fine, "a:grad_output": broken, "b:grad_output": broken}
    assert tt.diagnose(record(tmp_path / "run", sites))[0].site == "b:grad_output"


def test_an_infinity_that_was_always_there_is_a_mask(tmp_path: Path) -> None:
    sites = {"a:input.mask": lambda step: {"infs": 50.0}, "a:output": fine}
    assert tt.diagnose(record(tmp_path / "run", sites)) == []
    sites = {"a:output": lambda step: {"infs": 50.0}}
    assert tt.diagnose(record(tmp_path / "other", sites))[0].kind == "nonfinite"


def test_dead_and_constant_outputs_are_told_apart(tmp_path: Path) -> None:
    sites = {
        "dead:output": lambda step: {"zeros": 0.995 if step > 10 else 0.2},
        "still:output": lambda step: {"std": 0.0},
        "relu:output": lambda step: {"zeros": 0.6},
    }
    found = {finding.kind: finding for finding in tt.diagnose(record(tmp_path / "run", sites))}
    assert set(found) == {"dead", "constant"}
    # the fifth record in a row that shows it, and the third
    assert (found["dead"].sites, found["dead"].step) == (("dead:output",), 15)
    assert (found["constant"].sites, found["constant"].step) == (("still:output",), 2)


def test_saturation_is_known_by_the_class_and_the_models_last_layer_is_let_off(tmp_path: Path) -> None:
    high = lambda step: {"mean": 0.5, "rms": 0.99}  # noqa: E731
    ends = lambda step: {"mean": 0.5, "rms": np.sqrt(0.495)}  # noqa: E731
    sites = {"t:output": high, "s:output": ends, "l:output": high, "last:output": high}
    classes = {"t:output": "Tanh", "s:output": "Sigmoid", "last:output": "Tanh"}
    (finding,) = tt.diagnose(record(tmp_path / "run", sites, classes=classes))
    assert finding.kind == "saturated"
    assert set(finding.sites) == {"t:output", "s:output"}


def test_float16_next_to_its_end_is_a_warning_and_float32_is_not(tmp_path: Path) -> None:
    sites = {"a:output": lambda step: {"absmax": 64_000.0 if step == 17 else 9.0}}
    (finding,) = tt.diagnose(record(tmp_path / "half", sites, dtype="float16"))
    assert (finding.kind, finding.step) == ("near-overflow", 17)
    assert tt.diagnose(record(tmp_path / "brain", sites, dtype="bfloat16")) == []


def test_values_that_grow_a_hundredfold_explode_and_those_that_shrink_do_not(tmp_path: Path) -> None:
    sites = {
        "a:output": lambda step: {"rms": 1.0 if step < 30 else 1e4},
        "b:output": lambda step: {"rms": 1e4 if step < 3 else 1.0},
        "c:output": fine,
    }
    (finding,) = tt.diagnose(record(tmp_path / "run", sites))
    assert (finding.kind, finding.site, finding.step, finding.sites) == (
        "exploding",
        "a:output",
        32,
        ("a:output",),
    )


def test_gradients_that_shrink_from_layer_to_layer_vanish_and_one_small_bias_does_not(tmp_path: Path) -> None:
    def size(rms: float) -> Any:
        return lambda step: {"rms": rms}

    sites = {f"blocks.{i}:grad_output": size(10.0 ** (i - 6)) for i in range(6)}
    sites["blocks.1:param_grad.bias"] = size(1e-12)
    (finding,) = tt.diagnose(record(tmp_path / "run", sites))
    assert (finding.kind, finding.site, finding.step) == ("vanishing", "blocks.0:grad_output", 1)
    assert finding.value == pytest.approx(1e-5)
    even = {f"blocks.{i}:grad_output": fine for i in range(6)}
    assert tt.diagnose(record(tmp_path / "even", even)) == []


def test_a_parameter_whose_gradient_is_always_zero_does_not_learn(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("mean", "std", "min", "max", "absmax", "l1", "l2", "rms"), 0.0)
    sites = {"a:param_grad.weight": lambda step: nothing, "b:param_grad.weight": fine}
    (finding,) = tt.diagnose(record(tmp_path / "run", sites))
    assert (finding.kind, finding.sites) == ("zero-gradient", ("a:param_grad.weight",))


def test_what_was_wrong_before_the_first_nan_is_still_found(tmp_path: Path) -> None:
    sites = {
        "a:output": lambda step: {"zeros": 1.0} if step < 30 else {"nans": 100.0, "zeros": 0.0},
        "b:output": fine,
    }
    assert [finding.kind for finding in tt.diagnose(record(tmp_path / "run", sites))] == ["nonfinite", "dead"]


def test_rules_that_cannot_judge_are_named_with_what_to_record_for_them(tmp_path: Path) -> None:
    unjudged = {
        each.rule: each.reason for each in tt.diagnose(record(tmp_path / "run", {"a:output": fine})).unjudged
    }
    assert "record absmax of *:param_grad" in unjudged["zero-gradient"]
    assert "record rms of *:param," in unjudged["shrinking"]
    assert "tt.doctor(model, optimizer)" in unjudged["stale-gradient"]
    assert not unjudged.keys() & {"dead", "nonfinite", "exploding"}  # outputs are there


def test_limits_are_the_caller_s(tmp_path: Path) -> None:
    sites = {"relu:output": lambda step: {"zeros": 0.6}}
    folder = record(tmp_path / "run", sites)
    assert tt.diagnose(folder) == []
    assert tt.diagnose(tt.open(folder), rules=[dead(share=0.5)])[0].kind == "dead"


def test_diagnosing_imports_no_torch(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {"a:output": fine})
    program = f"import sys, torchtap; torchtap.diagnose({str(folder)!r}); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
