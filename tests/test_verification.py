"""verify: blames taps for what taps change, and nobody for a model that does not repeat itself."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt


class Restless(nn.Module):
    """Gives another answer each time, and does not ask torch's generators for it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Restless.calls += 1
        return x * (1 + 1e-6 * Restless.calls)


class SometimesNosy(nn.Linear):
    """Every fourth call under a hook is different."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        SometimesNosy.calls += bool(self._forward_hooks)
        return super().forward(x) + (self.calls % 4 == 3 and bool(self._forward_hooks))


def test_a_model_that_does_not_repeat_itself_is_said_to_and_taps_are_not_blamed() -> None:
    text = io.StringIO()
    result = tt.verify(nn.Sequential(nn.Linear(4, 4), Restless()), torch.ones(2, 4), repeat=3, file=text)
    assert result.identical
    assert not result.repeatable
    assert "0" in result.unsteady["outputs"]
    assert "does not repeat itself (3 runs each" in text.getvalue()


def test_what_taps_change_now_and_then_is_found_by_repeating() -> None:
    model = nn.Sequential(SometimesNosy(4, 4))
    SometimesNosy.calls = 3
    assert tt.verify(
        model, torch.ones(2, 4), file=io.StringIO()
    ).repeatable  # one run, and not the one that differs
    with pytest.raises(tt.VerificationError, match="1 differ: 0"):
        tt.verify(model, torch.ones(2, 4), repeat=4, file=io.StringIO())


def test_it_runs_with_as_many_threads_as_asked_and_leaves_torch_as_it_was() -> None:
    seen: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(x)

    had = torch.get_num_threads()
    text = io.StringIO()
    result = tt.verify(Counting(4, 4), torch.ones(2, 4), threads=had + 1, repeat=2, file=text)
    assert set(seen) == {had + 1}
    assert torch.get_num_threads() == had
    assert (result.threads, result.repeat, result.repeatable) == (had + 1, 2, True)
    assert f"2 runs each, torch threads: {had + 1}" in text.getvalue()


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"threads": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(tt.PlanError, match="from 1 on"):
        tt.verify(nn.Linear(2, 2), torch.ones(1, 2), **wrong)  # type: ignore[arg-type]


def test_a_number_of_threads_that_depends_on_the_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = nn.LayerNorm(4), torch.ones(2, 4)
    for value, threads, told in (
        (None, 2, False),
        ("false", 2, False),
        ("TRUE", 1, False),
        ("TRUE", 2, True),
    ):
        monkeypatch.delenv("OMP_DYNAMIC", raising=False)
        if value is not None:
            monkeypatch.setenv("OMP_DYNAMIC", value)
        text = io.StringIO()
        tt.verify(model, given, threads=threads, file=text)
        assert ("OMP_DYNAMIC" in text.getvalue()) == told


def test_a_model_that_does_not_repeat_itself_with_threads_is_told_what_may_cause_it() -> None:
    class Unsteady(nn.Linear):
        calls = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            Unsteady.calls += 1
            return super().forward(value) + Unsteady.calls

    text = io.StringIO()
    tt.verify(Unsteady(2, 2), torch.ones(1, 2), threads=2, repeat=2, file=text)
    assert "does not repeat itself" in text.getvalue()
    assert "thread by thread" in text.getvalue()
