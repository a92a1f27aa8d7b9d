"""A capture keeps whole outputs as they were when the model returned them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchtap as tt
from torchtap.errors import ReductionError
from torchtap.store.write.pool import pool_of

WIDE = 32 << 10  # floats: no longer a small value


class Twins(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


class Odd(nn.Module):
    """Shared and repeated modules, tuples, in-place changes, large values between small ones, another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.twins = Twins()
        self.wide = nn.Linear(4, WIDE)
        self.turned = nn.Identity()
        self.last = nn.Linear(4, 2)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.inner(self.first(x)))
        one, two = self.twins(x)
        self.wide(one)
        self.turned(two.t())
        return self.last(x + one + two)


def _look(model: nn.Module, passes: int = 1, **options: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with tt.capture(model, "**:output", **options) as seen:  # type: ignore[arg-type]
        for _ in range(passes):
            model(torch.randn(3, 4))
    return dict(seen)


def test_a_change_in_place_does_not_reach_what_was_kept() -> None:
    torch.manual_seed(0)
    model = Odd()
    x = torch.randn(3, 4)
    with tt.capture(model, "**:output") as seen:
        model(x)
    linear = torch.nn.functional.linear(seen["first:output"], model.inner[0].weight, model.inner[0].bias)  # type: ignore[arg-type]
    assert (linear < 0).any()
    assert torch.equal(seen["inner.0:output"], linear)
    assert torch.equal(seen["inner.1:output"], linear.relu())
    assert torch.equal(seen["inner:output"], linear.relu())


def test_one_copy_serves_a_value_that_is_shown_twice() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    with tt.capture(model, "**:output") as seen:
        model(torch.ones(1, 4))
    assert seen[":output"] is seen["0:output"] is seen["0.0:output"]


def test_looking_in_between_changes_nothing() -> None:
    model = Odd()
    with tt.capture(model, "**:output") as seen:
        assert list(seen) == []
        model(torch.ones(3, 4))
        once = list(seen)
        model(torch.zeros(3, 4))
    assert list(seen)[: len(once)] == once
    assert len(seen) == 2 * len(once)
    assert not seen.coverage()


def test_parts_that_are_called_without_the_model() -> None:
    model = Odd()
    with tt.capture(model, "**:output") as seen:
        model.first(torch.ones(1, 4))
        model.last(torch.ones(1, 4))
    assert list(seen) == ["first:output", "last:output"]
    assert "inner:output" in {missing.site for missing in seen.coverage()}


def test_copies_have_no_gradient_history_and_leave_the_training_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with tt.capture(model, "**:output") as seen:
        model(x).sum().backward()
    assert not any(value.requires_grad for value in seen.values())
    assert all(
        torch.equal(mine, parameter.grad)  # type: ignore[arg-type]
        for mine, parameter in zip(plain, model.parameters(), strict=True)
    )


def test_values_without_a_version_are_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with torch.inference_mode(), tt.capture(model, "**:output") as seen:
        model(-torch.ones(1, 4))
        seen_before = seen["0:output"].clone()
        assert torch.equal(seen["1:output"], seen_before.relu())


def test_values_inside_of_a_transform_are_plain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    with tt.capture(model, "**:output") as seen:
        torch.func.grad(lambda value: model(value).sum())(x)
        torch.func.vmap(model)(x)
    expected = model(x).detach()
    for name in (":output", ":output#1"):
        assert torch.allclose(seen[name], expected)
        assert type(seen[name]) is Tensor
        assert seen[name].numpy().shape == (3, 4)


def test_what_a_trace_inside_of_a_pass_runs_is_seen_as_it_is() -> None:
    class Tracing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.jit.trace(self.inner, x, check_trace=False)
            return x

    model, x = Tracing(), torch.randn(2, 4)
    with tt.capture(model, "inner:output") as seen:
        model(x)
    assert torch.equal(seen["inner:output"], model.inner(x))


def test_memory_that_is_not_there_is_an_error_with_the_sites_name() -> None:
    class Freed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gone = x.clone()
            gone.untyped_storage().resize_(0)
            return gone

    model = nn.Sequential(nn.Identity(), Freed())
    with pytest.raises(ReductionError, match="memory"), tt.capture(model, "**:output"):
        model(torch.ones(2, 2))
    with tt.capture(model, "**:output", strict=False) as seen:
        model(torch.ones(2, 2))
    assert "1:output" in seen.lost[0]
    assert torch.equal(seen["0:output"], torch.ones(2, 2))


def test_memory_that_cannot_be_had_is_an_error_with_the_sites_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, WIDE))

    def lend(nbytes: int) -> None:
        raise MemoryError(f"{nbytes} bytes are too many")

    monkeypatch.setattr(pool_of(model), "lend", lend)
    with pytest.raises(ReductionError, match=r"1:output.*too many"), tt.capture(model, "**:output"):
        model(torch.ones(1, 4))
    with tt.capture(model, "**:output", strict=False) as seen:
        model(torch.ones(1, 4))
    assert "1:output" in seen.lost[0]
    assert torch.equal(seen["0:output"], torch.ones(1, 4))


def test_a_checkpoint_s_repetition_is_not_kept_again() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Again()
    with tt.capture(model, "inner:output") as seen:
        model(torch.ones(1, 4)).sum().backward()
    assert list(seen) == ["inner:output"]


def test_other_threads_are_heard_if_they_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def call() -> None:
        for _ in range(20):
            model(torch.ones(1, 4))

    for all_threads, passes in ((True, 40), (False, 0)):
        with tt.capture(model, "0:output", all_threads=all_threads) as seen:
            threads = [threading.Thread(target=call) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if not all_threads:
                model(torch.ones(1, 4))
        expected = model[0](torch.ones(1, 4)).detach()
        assert len(seen) == (passes or 1)
        assert all(torch.equal(value, expected) for value in seen.values())


def test_what_nobody_looked_at_goes_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    gc.collect()
    gc.disable()
    try:
        with tt.capture(model, "**:output") as seen:
            model(torch.ones(1, 4))
        gone = weakref.ref(seen["0:output"])
        del seen
        assert gone() is None
    finally:
        gc.enable()


def test_a_selector_from_which_nothing_came_is_told() -> None:
    model = Odd()
    with pytest.warns(RuntimeWarning, match="nothing came from 'last:output'"):
        with tt.capture(model, "first:output", "last:output"):
            model.first(torch.ones(1, 4))


def test_sessions_inside_of_each_other_and_no_residue() -> None:
    model = Odd()
    x = torch.randn(3, 4)
    for _ in range(2):
        with tt.capture(model, "**:output") as outer:
            with tt.capture(model, "**:output") as inner:
                model(x)
            model(x)
        assert len(outer) == 2 * len(inner)
        assert all(torch.equal(outer[name], value) for name, value in inner.items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "__getstate__" not in vars(module)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.ones(1, 1, 1, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.arange(6).reshape(2, 1, 3),
        torch.randn(3, 2).t(),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(2, 2)),
        torch.randn(300, 300),
        torch.randn(300, 301)[:, 1:],
        torch.arange(1 << 17, dtype=torch.int16)[1:],
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_values_of_every_kind_are_what_they_were(value: Tensor) -> None:
    model = nn.Sequential(nn.Identity())
    with tt.capture(model, "0:output") as seen:
        model(value)
    found = seen["0:output"]
    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    assert torch.equal(found.nan_to_num(9.0), value.nan_to_num(9.0))
    assert found.data_ptr() != value.data_ptr() or not value.numel()
    assert found.data_ptr() % 64 == 0
    assert not found.is_conj()
    assert not found.is_neg()


@pytest.mark.parametrize("size", [8, WIDE])
def test_what_was_seen_never_changes_afterwards(size: int) -> None:
    """Neither by the model's own changes, nor by later captures, whose memory was used before."""
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    held, expected = [], []
    for number in range(6):
        x = torch.full((size,), -1.0 - number)
        with tt.capture(model, "**:output") as seen:
            model(x)
        expected.append(-1.0 - number)
        if number % 2:
            held.append((number, seen))  # booked later than the next capture, or when all is over
    for number, seen in held:
        assert torch.equal(seen["0:output"], torch.full((size,), expected[number]))
        assert torch.equal(seen["1:output"], torch.zeros(size))


def test_memory_of_large_values_comes_back_and_is_used_again() -> None:
    model = nn.Sequential(nn.Identity())
    pool = pool_of(model)

    def place() -> int:
        with tt.capture(model, "0:output") as seen:
            model(torch.ones(WIDE))
        return seen["0:output"].data_ptr()

    places = {place() for _ in range(10)}
    assert len(places) == 1
    made = pool.nbytes
    with tt.capture(model, "0:output") as unseen:  # nobody looks at it
        model(torch.ones(WIDE))
    del unseen
    assert {place() for _ in range(3)} == places
    assert pool.nbytes == made


def test_a_value_outlives_its_capture_and_the_model() -> None:
    model = nn.Sequential(nn.Identity())
    with tt.capture(model, "0:output") as seen:
        model(torch.full((WIDE,), 7.0))
    value = seen["0:output"]
    del model, seen
    gc.collect()
    other = nn.Sequential(nn.Identity())
    with tt.capture(other, "0:output"):
        other(torch.zeros(WIDE))
    assert torch.equal(value, torch.full((WIDE,), 7.0))


def test_more_than_the_pool_may_hold_is_kept_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(4)))
    monkeypatch.setattr(pool_of(model), "_limit", 2 * WIDE * 4)
    with tt.capture(model, "**:output") as seen:
        for number in range(3):
            model(torch.full((WIDE,), float(number)))
    assert len(seen) == 15
    for name, value in seen.items():
        number = int(name.partition("#")[2] or 0)
        assert torch.equal(value, torch.full((WIDE,), float(number))), name


def test_a_large_value_that_was_changed_in_between_is_copied_again() -> None:
    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    model = nn.Sequential(nn.Identity(), Changed(), nn.Identity())
    for size in (8, WIDE):
        with tt.capture(model, "**:output") as seen:
            model(torch.zeros(size))
        assert [float(seen[f"{number}:output"][0]) for number in range(3)] == [0.0, 1.0, 1.0]
        assert seen["1:output"] is seen["2:output"]


HOOKS = [
    name for name in vars(nn.Module()) if "hooks" in name and isinstance(getattr(nn.Module(), name), dict)
]


def _state(model: nn.Module) -> list[tuple[object, ...]]:
    """All that a capture could leave on a model. With these tables empty torch calls a forward at once."""
    return [
        (list(vars(module)), type(module), *(list(getattr(module, table)) for table in HOOKS))
        for module in model.modules()
    ]


@pytest.mark.parametrize("selector", ["**:output", "inner.*:output"])
def test_a_model_is_as_it_was_found_after_a_hundred_captures(selector: str) -> None:
    model = Odd()
    x = torch.randn(3, 4)
    found = _state(model)
    assert "_forward_hooks" in HOOKS
    assert not any(any(tables) for _, _, *tables in found)

    def look(times: int) -> int:
        for number in range(times):
            with tt.capture(model, selector) as seen:
                model(x)
            if number % 2:
                list(seen.items())
        del seen
        gc.collect()
        return len(gc.get_objects())

    before = look(10)
    assert look(100) <= before + 3
    assert _state(model) == found
    with pytest.raises(ZeroDivisionError), tt.capture(model, selector):
        raise ZeroDivisionError
    assert _state(model) == found
