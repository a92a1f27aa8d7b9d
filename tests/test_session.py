"""Captures: what a look inside keeps, of which thread, and what it leaves behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.models import GPT, mlp
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import torchtap as tt
from torchtap.errors import PlanError, ReductionError


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(table)
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def test_leaving_the_block_removes_every_hook_even_if_forward_raised() -> None:
    model = GPT()
    before = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(IndexError), tt.capture(model, "*:*") as seen:
        assert hooks_of(model) > 0
        assert torch.nn.functional.scaled_dot_product_attention is not before
        model(torch.tensor([[99]]))
    assert hooks_of(model) == 0
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert "embedding:input" in seen
    assert not _global_optimizer_pre_hooks


def test_calls_in_one_block_are_kept_apart_or_folded_together() -> None:
    model = mlp()
    x, y = torch.randn(4, 7), torch.randn(2, 7)
    with tt.capture(model, "0:output") as seen:
        model(x)
        model(y)
    assert list(seen) == ["0:output", "0:output#1"]
    assert seen["0:output#1"].shape == (2, 9)
    with tt.capture(model, "0:output", keep=tt.Stats()) as folded:
        model(x)
        model(y)
    assert folded["0:output"]["count"] == 6 * 9
    with tt.capture(model, "0:output", merge=True) as joined:
        model(x)
        model(y)
    assert joined["0:output"].shape == (6, 9)


def test_a_value_can_be_read_inside_the_block_already() -> None:
    model = mlp()
    with tt.capture(model, "0:output") as seen:
        model(torch.ones(1, 7))
        assert seen["0:output"].shape == (1, 9)
        assert seen["0"].shape == (1, 9)
        assert "1:output" not in seen
        assert seen.get("1:output") is None


def test_captures_nest_on_one_model() -> None:
    model = mlp()
    with tt.capture(model, "*:output") as outer:
        model(torch.ones(1, 7))
        with tt.capture(model, "0:output") as inner:
            model(torch.zeros(1, 7))
    assert set(inner) == {"0:output"}
    assert torch.equal(outer["0:output#1"], inner["0:output"])
    assert not torch.equal(outer["0:output"], inner["0:output"])


def test_a_second_capture_takes_memory_that_the_first_has_left_and_none_that_is_still_held() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(7, 256), torch.nn.Tanh()), torch.randn(512, 7)

    def captured() -> dict[str, torch.Tensor]:
        with tt.capture(model, "0:output", "1:output") as seen:
            model(x)
        return dict(seen)

    first = captured()
    left = first.pop("0:output").data_ptr()
    second = captured()
    assert left in {value.data_ptr() for value in second.values()}
    assert torch.equal(first["1:output"], model(x))
    assert first["1:output"].data_ptr() not in {value.data_ptr() for value in second.values()}


def test_two_sessions_in_two_threads_see_their_own_values_only() -> None:
    model = mlp()
    barrier = threading.Barrier(2)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        x = torch.full((1, 7), float(number))
        with tt.capture(model, ":input") as seen:
            barrier.wait()
            for _ in range(20):
                model(x)
            barrier.wait()
        found[number] = dict(seen)

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2):
        assert len(found[number]) == 20
        assert all(torch.equal(value, torch.full((1, 7), float(number))) for value in found[number].values())


def test_another_thread_is_heard_if_asked() -> None:
    model = mlp()
    with tt.capture(model, ":output", all_threads=True) as seen:
        thread = threading.Thread(target=lambda: model(torch.ones(1, 7)))
        thread.start()
        thread.join()
    assert len(seen) == 1


class Chain(nn.Module):
    """Thirty-two modules one after the other; each adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x + 1)
        return x


def test_values_of_many_threads_at_once_do_not_mix() -> None:
    # More sites than the first rows of statistics hold, and values so large that the kernel lets go of the interpreter.
    starts = [torch.arange(300_000.0) * (number + 1) for number in range(4)]
    for _ in range(3):
        model = nn.ModuleList(Chain() for _ in starts)
        taps = tt.tap("*:output", keep=tt.Stats()), tt.tap("*.parts.31:output", keep=tt.Full())
        with tt.capture(model, *taps, all_threads=True) as seen:
            threads = [
                threading.Thread(target=model[number], args=(start,)) for number, start in enumerate(starts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for number, start in enumerate(starts):
            for part in range(32):
                site = f"{number}.parts.{part}:output"
                found = seen[site]["stats"] if part == 31 else seen[site]
                assert found["count"] == 300_000, site
                assert found["min"] == part + 1, site
                assert found["max"] == float((start + part + 1).max()), site
            assert torch.equal(seen[f"{number}.parts.31:output"]["full"], model[number](start))


def test_emitted_values_have_sites() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tt.emit("logits", x * 2) + 1

    model = nn.Sequential(Router(), Router())
    with tt.capture(model, "*:value") as seen:
        model(torch.ones(2))
    assert list(seen) == ["0:value.logits", "1:value.logits"]
    assert torch.equal(seen["1:value.logits"], torch.full((2,), 6.0))
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 7.0))
    with tt.capture(model, "*:value.other") as seen:
        model(torch.ones(2))
    assert "emit" in seen.coverage()[0].reason


def test_inference_mode_and_no_grad_are_seen_too() -> None:
    model = mlp()
    with tt.capture(model, "*:output", tt.tap("*:output")) as seen, torch.inference_mode():
        out = model(torch.ones(2, 7))
    assert torch.equal(seen[":output"]["full"], out)
    with tt.capture(model, "*:output") as seen, torch.no_grad():
        out = model(torch.ones(2, 7))
    assert torch.equal(seen["2:output"], out)


def test_the_only_tensor_of_a_structure_is_found_without_its_leaf() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x + 1, None

    class Paired(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    for model, found in ((Wrapped(), True), (Paired(), False)):
        with tt.capture(model, ":output") as seen:
            model(torch.zeros(2))
        assert (":output" in seen) == found
    with pytest.raises(LookupError, match=r"several leaves: :output\.0, :output\.1"):
        seen[":output"]


def test_a_capture_that_is_not_strict_says_what_it_could_not_keep() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with tt.capture(model, ":output", keep=tt.Stats(), strict=False) as seen:
        model(torch.empty(1, 2, device="meta"))
    assert seen.lost[0].startswith(":output: ReductionError: a Tensor on meta has no values")
    with pytest.raises(tt.SelectionError, match=r"':output' came, but nothing of it could be kept: .*meta"):
        seen[":output"]


class _Freed(nn.Module):
    """Gives back a value whose memory is gone, as a sharded parameter's is between two uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x * 2
        value.untyped_storage().resize_(0)
        return value


@pytest.mark.parametrize("keep", [tt.Full(), tt.Stats()])
def test_what_could_not_be_kept_is_not_among_what_came(keep: tt.Full | tt.Stats) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    model.add_module("freed", _Freed())
    with tt.capture(model, ["0:output", "freed:output"], keep=keep, strict=False) as seen:
        model(torch.ones(2, 3))
    assert list(dict(seen)) == ["0:output"]
    assert ("freed:output" in seen, len(seen), seen.get("freed:output", "none")) == (False, 1, "none")
    assert "freed:output" not in repr(seen)
    with pytest.raises(tt.SelectionError, match=r"came, but nothing of it could be kept: .*no memory"):
        seen["freed:output"]


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x)
        return x


def test_a_whole_tensor_beside_statistics_does_not_keep_these_from_folding_over_passes() -> None:
    torch.manual_seed(0)
    model, inputs = _Twice(), [torch.randn(4, 3) for _ in range(3)]
    with torch.no_grad(), tt.capture(model, tt.tap("layer:output")) as alone:
        for x in inputs:
            model(x)
    with torch.no_grad(), tt.capture(model, "layer:output", tt.tap("layer:output")) as both:
        for x in inputs:
            model(x)
    assert list(alone) == ["layer:output", "layer:output#1"]
    assert list(both) == ["layer:output", *(f"layer:output#{n}" for n in range(1, 6))]
    for name in alone:
        assert both[name]["stats"] == alone[name]
    assert alone["layer:output"]["count"] == 3 * 12
    for number, x in enumerate(inputs):
        value = both[f"layer:output#{2 * number}" if number else "layer:output"]
        whole = value["full"] if isinstance(value, dict) else value
        with torch.no_grad():
            assert torch.equal(whole, model.layer(x))


def test_passes_of_different_lengths_fold_call_by_call() -> None:
    model = _Twice()
    with torch.no_grad(), tt.capture(model, "layer:output", tt.tap("layer:output")) as seen:
        model(torch.ones(4, 3), 1)
        model(torch.ones(4, 3), 3)
    assert [seen[f"layer:output{call}"]["stats"]["count"] for call in ("", "#1", "#2")] == [24, 12, 12]
    assert seen["layer:output#3"].shape == (4, 3)


def test_taps_on_different_sites_do_not_mind_each_other() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with torch.no_grad(), tt.capture(model, "1:output", tt.tap("0:output")) as seen:
        for _ in range(3):
            model(torch.ones(4, 3))
    assert list(seen) == ["0:output", "1:output", "1:output#1", "1:output#2"]
    assert seen["0:output"]["count"] == 36


def test_a_tensor_kept_whole_at_one_site_is_measured_at_the_next() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.no_grad(), tt.capture(model, "0:output", tt.tap(":output")) as seen:
        expected = model(x)
    assert torch.equal(seen["0:output"], expected)
    assert seen[":output"]["count"] == 6
    assert seen[":output"]["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)


def test_statistics_beside_whole_tensors_are_those_of_their_own_value_in_every_step() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(7)))
    expected: dict[tuple[int, str], float] = {}
    taps = [tt.tap(f"{n}:output", tt.Full()) for n in range(7)] + [tt.tap(f"{n}:input") for n in range(7)]
    found: dict[tuple[int, str], float] = {}

    class Kept:
        def write(self, record: Any) -> None:
            for block in record.scalars:
                column = block.statistics.index("max")
                for row, site in enumerate(block.sites):
                    found[record.step, site] = float(block.values[row, column])

        def close(self) -> None:
            pass

    with torch.no_grad(), tt.watch(model, None, taps, sinks=[Kept()]) as watch:
        for step in range(4):
            x = torch.randn(2, 3)
            with watch.step():
                model(x)
            for n, layer in enumerate(model):
                expected[step, f"{n}:input"] = x.max().item()
                x = nn.functional.linear(x, layer.weight, layer.bias)  # not a call of the model
    assert found == pytest.approx(expected)


def test_a_capture_by_reference_refuses_what_was_changed_afterwards_and_gives_the_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with tt.capture(model, "*:output") as copied:
        model(x)
    with tt.capture(model, "*:output", keep=tt.Full(copy=False)) as seen:
        model(x)
    assert list(seen) == list(copied)
    with pytest.raises(ReductionError, match=r"^0:output: .*changed in place"):
        seen["0:output"]
    for name in ("1:output", "2:output", ":output"):
        assert torch.equal(seen[name], copied[name])
    assert "0:output" in repr(seen)
    assert not seen["2:output"].requires_grad


def test_references_are_for_captures_alone() -> None:
    with pytest.raises(PlanError, match=r"copy=False.*capture"):
        tt.watch(nn.Linear(2, 2), None, [tt.tap("*:output", keep=tt.Full(copy=False))])
