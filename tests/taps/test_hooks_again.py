"""Hooks that rest between live steps: the same ones go on again, whatever others did to the model meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.hooks.hooks import Hooks

TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
SECOND = tt.tap("*:output", every=2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def on(model: nn.Module) -> list[list[tuple[int, object]]]:
    """All that is in torch's tables."""
    return [list(getattr(module, table).items()) for module in model.modules() for table in TABLES]


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


class Records:
    """Which sites came at which step."""

    def __init__(self) -> None:
        self.steps: dict[int, set[str]] = {}

    def write(self, record: Any) -> None:
        sites = {site for block in record.scalars for site in block.sites}
        self.steps.setdefault(record.step, set()).update(sites)

    def close(self) -> None:
        pass


def step(watch: tt.Watch, model: nn.Module, inside: Callable[[], object] = lambda: None) -> None:
    with watch.step():
        inside()
        model(torch.ones(3, 4))


def test_the_same_hooks_under_the_same_numbers_go_on_at_the_next_live_step() -> None:
    model = made()
    with tt.watch(model, None, [SECOND]) as watch:
        live: list[Any] = []
        for _ in range(5):
            step(watch, model, lambda: live.append(on(model)))
    assert any(live[0])
    assert live[0] == live[2] == live[4]
    assert not any(live[1])
    assert not any(live[3])


def test_each_set_of_live_taps_has_hooks_of_its_own_however_many_sets_there_are() -> None:
    schedule = {0: 2, 1: 3, 2: 5, 3: 7}  # 15 different sets of live taps
    model, records = nn.Sequential(*(nn.Linear(4, 4) for _ in schedule)), Records()
    taps = [tt.tap(f"{site}:output", every=every) for site, every in schedule.items()]
    with tt.watch(model, None, taps, sinks=[records]) as watch:
        for _ in range(215):
            step(watch, model)
    assert records.steps == {
        number: sites
        for number in range(215)
        if (sites := {f"{site}:output" for site, every in schedule.items() if number % every == 0})
    }
    assert not any(on(model))


def test_a_hook_that_was_added_between_two_live_steps_runs_before_ours() -> None:
    model = made()
    with tt.watch(model, None, [SECOND]) as watch:
        step(watch, model)
        step(watch, model)
        handle = model[0].register_forward_hook(lambda *_: torch.full((3, 4), 7.0))
        first = model.register_forward_pre_hook(lambda *_: None)

        def look() -> None:
            assert next(iter(model[0]._forward_hooks)) == handle.id
            assert len(model[0]._forward_hooks) == 2
            assert (
                list(model._forward_pre_hooks)[-1] == first.id
            )  # the begin of a pass comes ahead of everything

        step(watch, model, look)
        step(watch, model)
        assert list(model[0]._forward_hooks) == [handle.id]
    assert list(model[0]._forward_hooks) == [handle.id]
    assert list(model._forward_pre_hooks) == [first.id]


@pytest.mark.parametrize("how", ["cleared", "another table"])
@pytest.mark.parametrize("when", ["live", "at rest"])
def test_what_others_did_to_the_tables_loses_no_later_step(how: str, when: str) -> None:
    model, records = made(), Records()

    def others() -> None:
        for module in model.modules():
            if how == "cleared":
                module._forward_hooks.clear()
            else:
                module._forward_hooks = OrderedDict()

    with tt.watch(model, None, [tt.tap("*:output", every=2)], sinks=[records]) as watch:
        step(watch, model)
        step(watch, model)
        if when == "at rest":
            others()
        step(watch, model, others if when == "live" else lambda: None)
        for _ in range(2):
            step(watch, model)
    assert records.steps[4] >= {"0:output", "2:output"}
    assert not any(on(model))


@pytest.mark.parametrize("how", ["cleared", "another table"])
def test_hooks_that_others_removed_are_noticed_after_they_have_come_back(how: str) -> None:
    model = made()
    root = Hooks(model)
    root.after(model[0], lambda _: None)
    root.suspend("live")
    assert root.resume("live")
    assert root.lost() == []
    if how == "cleared":
        model[0]._forward_hooks.clear()
    else:
        model[0]._forward_hooks = OrderedDict()
    assert root.lost() == [model[0]]
    root.remove()
    assert not any(on(model))


def test_a_table_that_others_put_back_later_has_none_of_our_hooks_left() -> None:
    model = made()
    walker = Hooks(model)
    walker.after(model[0], lambda _: None)
    theirs, model[0]._forward_hooks = model[0]._forward_hooks, OrderedDict()
    walker.remove()
    assert not theirs


def test_a_module_that_was_replaced_between_two_live_steps_is_told() -> None:
    model = made()
    with tt.watch(model, None, [SECOND]) as watch:
        step(watch, model)
        step(watch, model)
        replaced, model[0] = model[0], nn.Linear(4, 4)
        step(watch, model)
        assert any("replaced" in loss for loss in watch.lost)
    assert not any(on(model))
    assert not any(on(replaced))


def test_taps_that_follow_the_model_go_on_a_module_that_came_between_two_live_steps() -> None:
    model, records = made(), Records()
    with tt.watch(model, None, [SECOND], sinks=[records], follow_model=True) as watch:
        step(watch, model)
        step(watch, model)
        replaced, model[0] = model[0], nn.Linear(4, 4)
        step(watch, model, lambda: [model[0]._forward_hooks.keys(), replaced._forward_hooks.keys()])
    assert "0:output" in records.steps[2]
    assert not any(on(model))
    assert not any(on(replaced))


def test_copies_and_pickles_are_plain_while_hooks_are_on_again_and_while_they_rest() -> None:
    model = made()
    plain = attributes(model)
    with tt.watch(model, None, [SECOND]) as watch:

        def check() -> None:
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert not any(on(other))
                assert attributes(other) == plain

        for _ in range(4):
            step(watch, model, check)
            check()
    assert attributes(model) == plain


def test_two_watches_on_one_model_do_not_take_each_other_s_hooks_off() -> None:
    model, plain = made(), attributes(made())
    each_second, each_third = Records(), Records()
    with tt.watch(model, None, [SECOND], sinks=[each_second]) as one:
        with tt.watch(model, None, [tt.tap("*:output", every=3)], sinks=[each_third]) as two:
            for _ in range(7):
                with one.step(), two.step():
                    model(torch.ones(3, 4))
                    copied = copy.deepcopy(model)
                    assert attributes(copied) == plain
                    assert not any(on(copied))
        for _ in range(3):
            step(one, model)
    assert sorted(each_second.steps) == [0, 2, 4, 6, 8]
    assert sorted(each_third.steps) == [0, 3, 6]
    assert not any(on(model))
    assert attributes(model) == plain


def test_a_watch_that_is_closed_while_its_hooks_rest_leaves_the_tables_as_they_were() -> None:
    model = made()
    model[0].register_forward_hook(lambda *_: None)
    before, plain = on(model), attributes(model)
    with tt.watch(model, None, [SECOND]) as watch:
        step(watch, model)
        step(watch, model)
    assert on(model) == before
    assert attributes(model) == plain


def test_hooks_that_a_class_puts_on_in_its_own_way_are_put_on_by_it_each_time() -> None:
    class Own(nn.Linear):
        registered = 0

        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            Own.registered += 1
            return super().register_forward_hook(*args, **kwargs)

    records, model = Records(), nn.Sequential(Own(4, 4), nn.ReLU())
    with tt.watch(model, None, [SECOND], sinks=[records]) as watch:
        for _ in range(5):
            step(watch, model)
    assert Own.registered == 3
    assert all("0:output" in sites for sites in records.steps.values())
    assert len(records.steps) == 3
    assert not any(on(model))


def test_gradients_and_inputs_come_again_after_a_rest() -> None:
    model, records = made(), Records()
    taps = [tt.tap(f"*:{kind}", every=2) for kind in ("input", "output", "grad_input", "grad_output")]
    with tt.watch(model, None, taps, sinks=[records]) as watch:
        for _ in range(5):
            with watch.step():
                model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert records.steps[0] == records.steps[2] == records.steps[4]
    assert {"0:input", "0:grad_input", "0:grad_output"} <= records.steps[0] | {
        name.split(".")[0] for name in records.steps[0]
    }


def test_nothing_is_on_where_putting_on_fails_half_way() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(nn.Linear(4, 4), Bare())
    plain = attributes(model)
    walker = Hooks(model)
    for module in model:
        walker.after(module, lambda _: None)
    walker.suspend("live")
    table = model[1].__dict__.pop("_forward_hooks")
    with pytest.raises(AttributeError):
        walker.resume("live")
    model[1].__dict__["_forward_hooks"] = table
    assert not any(on(model))
    assert attributes(model) == plain
    assert walker.resume("live")
    assert walker.lost() == []
    walker.remove()
    assert not any(on(model))
    assert attributes(model) == plain


def test_hooks_that_were_let_go_of_do_not_come_back() -> None:
    model = made()
    walker = Hooks(model)
    walker.after(model[0], lambda _: None)
    walker.suspend("live")
    walker.remove()
    assert not walker.resume("live")
    assert not any(on(model))


def test_hooks_come_off_while_the_model_is_collected_as_garbage() -> None:
    class Holder:
        def __init__(self) -> None:
            self.model = made()
            self.model.holder = self  # type: ignore[assignment]
            self.walker = Hooks(self.model)
            self.walker.after(self.model[0], lambda _: None)

        def __del__(self) -> None:
            self.walker.remove()
            left.append((any(on(self.model)), "__getstate__" in vars(self.model[0])))

    left: list[tuple[bool, bool]] = []
    Holder()
    gc.collect()
    assert left == [(False, False)]
