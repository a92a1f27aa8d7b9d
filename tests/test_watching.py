"""A training under watch: its clock, what each step's record holds, what goes wrong."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import GPT, make, mlp
from torch import Tensor, nn

import torchtap as tt
from torchtap.errors import ReductionError, SessionError
from torchtap.store.record import StepRecord


class Kept:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def number(self, step: int, site: str, statistic: str) -> float:
        for record in self.records:
            for block in record.scalars:
                if record.step == step and site in block.sites and statistic in block.statistics:
                    return float(block.values[block.sites.index(site), block.statistics.index(statistic)])
        raise KeyError((step, site, statistic))


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(table)
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def test_the_newest_numbers_of_two_reductions_of_one_site_are_both_there() -> None:
    model = mlp()
    with tt.watch(model, None, [tt.tap("0:output"), tt.tap("0:output", tt.Entropy())]) as watch:
        with watch.step():
            model(torch.randn(8, 7))
        assert watch.latest("0:output", "count") > 0
        assert watch.latest("0:output", "entropy") is not None


def test_micro_batches_of_a_step_fold_into_one_record() -> None:
    model, kept = mlp(), Kept()
    x = torch.randn(8, 7)
    with tt.watch(model, None, [tt.tap("*:output"), tt.tap("0:output", tt.Full())], sinks=[kept]) as watch:
        with watch.step():
            for part in x.split(2):
                model(part).sum().backward()
    with tt.capture(model, "0:output") as seen:
        model(x)
    assert len(kept.records) == 1
    assert kept.number(0, "0:output", "count") == 72
    assert kept.number(0, "0:output", "mean") == pytest.approx(
        seen["0:output"].double().mean().item(), rel=1e-6
    )
    [item] = kept.records[0].tensors
    assert torch.allclose(item.value, seen["0:output"])


def test_the_schedule_decides_which_steps_are_recorded_and_hooked() -> None:
    model, kept = mlp(), Kept()
    hooked = []
    with tt.watch(
        model, None, [tt.tap("*:output", every=3), tt.tap("0:output", steps=[4])], sinks=[kept]
    ) as watch:
        for _ in range(8):
            with watch.step():
                hooked.append(hooks_of(model) > 0)
                model(torch.ones(2, 7))
    assert [record.step for record in kept.records] == [0, 3, 4, 6]
    assert hooked == [step in (0, 3, 4, 6) for step in range(8)]
    assert kept.records[2].scalars[0].sites == ("0:output",)


def test_an_optimizer_can_be_the_clock_with_gradient_accumulation() -> None:
    model, kept = mlp(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradients: list[Tensor] = []
    with tt.watch(model, None, [tt.tap("0:param_grad.weight"), tt.tap("0:output")], sinks=[kept]) as watch:
        watch.follow(optimizer)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 7)).pow(2).mean().backward()
            gradients.append(model[0].weight.grad.clone())  # type: ignore[index,union-attr]
            optimizer.step()
            optimizer.zero_grad()
    assert [record.step for record in kept.records] == [0, 1, 2]
    for step, gradient in enumerate(gradients):
        assert kept.number(step, "0:param_grad.weight", "l2") == pytest.approx(
            gradient.norm().item(), rel=1e-6
        )
        assert kept.number(step, "0:output", "count") == 2 * 4 * 9


def test_gradients_are_those_that_the_optimizer_uses_after_clipping() -> None:
    model, kept = mlp(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, None, "*:param_grad", sinks=[kept]) as watch, watch.step():
        model(torch.randn(4, 7)).pow(2).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = model[2].weight.grad.norm().item()  # type: ignore[index,union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert kept.number(0, "2:param_grad.weight", "l2") == pytest.approx(clipped, rel=1e-6)


def test_the_clock_can_be_set_by_epoch_and_batch() -> None:
    model, kept = mlp(), Kept()
    with tt.watch(model, None, tt.tap("0:output", epochs=[1], batches=[0, 2]), sinks=[kept]) as watch:
        for epoch in range(3):
            watch.set_epoch(epoch)
            for batch in range(4):
                watch.set_batch(batch)
                model(torch.ones(1, 7))
    assert [(r.epoch, r.batch, r.step) for r in kept.records] == [(1, 0, 4), (1, 2, 6)]


def test_the_clock_can_be_set_by_step_and_does_not_go_back() -> None:
    model, kept = mlp(), Kept()
    watch = tt.watch(model, None, "0:output", sinks=[kept])
    for step in (10, 20, 20, 30):
        watch.set_step(step)
        model(torch.ones(1, 7))
    with pytest.raises(SessionError, match="steps only grow"):
        watch.set_step(5)
    watch.close()
    assert [r.step for r in kept.records] == [10, 20, 30]
    with pytest.raises(SessionError, match="closed"):
        watch.set_step(40)
    watch.close()


def test_a_watch_without_any_clock_records_one_step() -> None:
    model, kept = mlp(), Kept()
    with tt.watch(model, None, "0:output", sinks=[kept]):
        model(torch.ones(1, 7))
    assert [r.step for r in kept.records] == [0]


def test_a_step_inside_a_step_is_refused() -> None:
    with (
        tt.watch(mlp(), None, "*:output") as watch,
        watch.step(),
        pytest.raises(SessionError, match="inside"),
        watch.step(),
    ):
        pass


def test_a_training_pass_between_steps_is_in_no_record_and_phases_are_told_apart() -> None:
    model, kept = mlp(), Kept()
    taps = [tt.tap("0:output", phase="train"), tt.tap("2:output", phase="eval")]
    with tt.watch(model, None, taps, sinks=[kept]) as watch:
        with watch.step():
            model(torch.ones(1, 7))
        with pytest.warns(RuntimeWarning, match="after step 0 and before the next"):
            model(torch.ones(5, 7))
        model.eval()
        with watch.step():
            model(torch.ones(2, 7))
    assert [(r.phase, r.scalars[0].sites) for r in kept.records] == [
        ("train", ("0:output",)),
        ("eval", ("2:output",)),
    ]
    assert kept.number(1, "2:output", "count") == 6


def test_a_metric_that_raises_costs_its_values_and_not_the_training() -> None:
    def losses(watched: bool) -> list[float]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def broken(value: Tensor) -> Tensor:
            raise ValueError("no luck")

        taps = [tt.tap("*:output", tt.Metric(broken)), tt.tap("0:output")]
        watch = tt.watch(model, None, taps if watched else "0:output")
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                with watch.step():
                    loss = model(torch.ones(4, 7)).pow(2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    found.append(loss.item())
            watch.close()
        if watched:
            assert any("no luck" in message and "0:output" in message for message in watch.lost)
        return found

    assert losses(True) == losses(False)


def test_strict_turns_a_loss_into_an_error() -> None:
    def broken(value: Tensor) -> Tensor:
        raise ValueError("no luck")

    model = mlp()
    with (
        pytest.raises(ReductionError, match="no luck"),
        tt.watch(model, None, tt.tap("0:output", tt.Metric(broken)), strict=True) as watch,
        watch.step(),
    ):
        model(torch.ones(1, 7))
    assert hooks_of(model) == 0


def test_a_failing_sink_is_told_and_the_others_go_on() -> None:
    class Broken:
        def write(self, record: StepRecord) -> None:
            raise OSError("disk on fire")

        def close(self) -> None:
            pass

    model, kept = mlp(), Kept()
    with pytest.warns(RuntimeWarning, match="disk on fire"):
        with tt.watch(model, None, "0:output", sinks=[Broken(), kept]) as watch:
            for _ in range(3):
                with watch.step():
                    model(torch.ones(1, 7))
    assert len(kept.records) == 3
    assert len(watch.lost) == 1


def test_a_watched_model_pickles_and_its_copy_is_not_watched() -> None:
    model, kept = mlp(), Kept()
    with tt.watch(model, None, "*:output", sinks=[kept]) as watch, watch.step():
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        model(torch.ones(1, 7))
        twin(torch.ones(3, 7))
        again(torch.ones(3, 7))
    assert kept.number(0, "0:output", "count") == 9


def test_logged_numbers_go_with_their_step() -> None:
    kept = Kept()
    with tt.watch(mlp(), None, tt.tap("*:output", every=100), sinks=[kept]) as watch:
        for step in range(3):
            with watch.step():
                watch.log("loss", torch.tensor(step * 0.5))
                watch.log(rate=0.1)
    assert kept.number(2, ":value.loss", "value") == 1.0
    assert kept.number(1, ":value.rate", "value") == 0.1


def test_the_summary_is_a_table_and_names_what_is_missing() -> None:
    model = make("thrice").model
    text = io.StringIO()
    with tt.watch(model, None, "*:output") as watch:
        with watch.step():
            model(torch.ones(2, 5))
        watch.summary(text)
    assert "shared:output#2" in text.getvalue()
    assert "never:output: module not called" in text.getvalue()


def test_nothing_keeps_the_model_or_its_activations_alive() -> None:
    model = GPT()
    inner = weakref.ref(model)
    watch = tt.watch(model, None, "*:*")
    held: list[Any] = []

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        held.append(weakref.ref(output))

    model.blocks[0].register_forward_hook(remember)
    with watch.step():
        model(torch.randint(0, 11, (2, 6))).sum().backward()
    watch.close()
    gc.collect()
    assert held[0]() is None
    del watch, model
    gc.collect()
    assert inner() is None


def test_values_and_gradients_that_come_late_are_not_put_into_the_next_step() -> None:
    model, kept = mlp(), Kept()
    with tt.watch(model, None, ["*:grad_output"], sinks=[kept]) as watch:
        with watch.step():
            loss = model(torch.ones(1, 7)).sum()
        loss.backward()
        with watch.step():
            pass
    assert kept.records == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": ["*:output"]}, r"run=\['\*:output'\] names no folder.*taps come third"),
        ({"run": ""}, "run='' names no folder"),
        ({"taps": None}, "a tap needs at least one selector"),
        ({"taps": 3}, "a selector is text, a module or its type.* got 3"),
        ({"sinks": [print]}, "CallbackSink makes one of a function"),
        ({"sinks": ["memory"]}, "make_sink of a text"),
        ({"sinks": tt.MemorySink()}, "give a list of things with write"),
    ],
)
def test_arguments_in_the_wrong_place_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(tt.PlanError, match=message):
        tt.watch(nn.Linear(2, 2), **arguments)


def test_what_is_logged_is_a_number_or_is_refused_at_once() -> None:
    sink = tt.MemorySink()
    with tt.watch(nn.Linear(2, 2), None, sinks=[sink]) as watch:
        with watch.step():
            watch.log({"loss": 1.5}, lr=torch.tensor(2))
            for wrong in ("abc", None, torch.tensor(1j)):
                with pytest.raises(tt.SessionError, match=r"log: 'it' is .*, which is no number"):
                    watch.log("it", wrong)  # type: ignore[arg-type]
        assert sink.series(":value.loss", "value").values.tolist() == [1.5]
        assert sink.series(":value.lr", "value").values.tolist() == [2.0]
        with pytest.raises(tt.SessionError, match=r"follow\('adam'\): give a torch.optim.Optimizer"):
            watch.follow("adam")
    with pytest.raises(tt.SessionError, match="closed"):
        watch.log(loss=1.0)


@pytest.mark.parametrize("kind", ["output", "input", "grad_output"])
def test_a_structure_that_cannot_be_looked_through_costs_its_own_values(kind: str) -> None:
    class Endless(nn.Module):
        def forward(self, x: Any) -> Any:
            x.append(x)
            return x

    model = nn.Sequential(nn.Identity(), Endless())
    with pytest.warns(RuntimeWarning, match="RecursionError"), tt.watch(model, None, f"1:{kind}") as watch:
        for _ in range(2):
            with watch.step():
                endless = [torch.zeros(1)]
                model(model(endless))
    assert len(watch.lost) == 1


def test_parameters_that_come_to_be_in_the_first_pass_are_watched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with tt.watch(model, tmp_path, ["*:output", "*:param", "*:buffer"]) as watch, watch.step():
        model(torch.randn(4, 5))
    assert not watch.lost
    assert tt.open(tmp_path).series("0:param.weight", "count").values.tolist() == [15]


def test_an_output_is_gone_as_soon_as_the_model_lets_go_of_it() -> None:
    gone: list[bool] = []

    class LetsGo(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = self.first(x)
            seen = weakref.ref(output)
            del output
            gone.append(seen() is None)
            result: torch.Tensor = self.second(x)
            return result

    model = LetsGo()
    with tt.watch(model, None, "*:output") as watch, watch.step(), torch.no_grad():
        model(torch.ones(2, 3))
    assert gone == [True]


def test_the_first_watch_without_compiled_parts_warns_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("torchtap.native_check._told", False)
    monkeypatch.setattr("torchtap.reduce.kernel.native", None)
    for _ in range(3):
        tt.watch(nn.Linear(2, 2), None, [":output"]).close()
    told = [str(each.message) for each in recwarn if "compiled parts" in str(each.message)]
    assert len(told) == 1
    assert "statistics" in told[0]
    assert "checksums" not in told[0]


def test_a_platform_without_wheels_is_not_warned(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("torchtap.native_check._told", False)
    monkeypatch.setattr("torchtap.reduce.kernel.native", None)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    tt.watch(nn.Linear(2, 2), None, [":output"]).close()
    assert not [each for each in recwarn if "compiled parts" in str(each.message)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": [0, 5]}, r"steps= is said of a tap: tt.watch\(model, run, tt.tap\(.*steps="),
        ({"evry": 10}, "watch has no option 'evry'; those of a run are .*compress"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_an_option_that_a_watch_does_not_have_is_told_and_nothing_is_begun(
    options: dict[str, Any], told: str, recorded: bool, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(tt.PlanError, match=told):
        tt.watch(model, tmp_path / "run" if recorded else None, "*:output", **options)
    assert not (tmp_path / "run").exists()
    assert not model._forward_hooks
