"""Hooks and visitors: every way shows the same calls, takes back other values, and leaves the model as it was."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtap.hooks.hooks import Hooks
from torchtap.hooks.visit import Call, Stop, Visiting
from torchtap.plan.sites import places

WAYS = ["hook", "wrap", "forward"]


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.act(self.layer(self.layer(x))) * scale


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda value: self.layer(self.layer(value)), x, use_reentrant=False)


class Seen:
    """Notes each call; may double outputs of one path."""

    def __init__(self, double: str | None = None) -> None:
        self.calls: list[tuple[str, str, int, bool, str | None]] = []
        self._double = double

    def before(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(("in", call.path, call.number, call.repeated, call.parent))
        return None

    def after(self, call: Call, output: Any) -> Any:
        self.calls.append(("out", call.path, call.number, call.repeated, call.parent))
        return output * 2 if call.path == self._double else None


def stops(model: nn.Module) -> list[Stop]:
    return [Stop(place.path, place.module) for place in places(model)]


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_every_call_is_shown_with_its_number_and_who_made_it() -> None:
    model, seen = Twice(), Seen()
    with Visiting(model, seen, stops(model)):
        model(torch.ones(2, 3))
        first = list(seen.calls)
        seen.calls.clear()
        model(torch.ones(2, 3))
    assert first == [
        ("in", "", 0, False, None),
        ("in", "layer", 0, False, ""), ("out", "layer", 0, False, ""),
        ("in", "layer", 1, False, ""), ("out", "layer", 1, False, ""),
        ("in", "act", 0, False, ""), ("out", "act", 0, False, ""),
        ("out", "", 0, False, None),
    ]  # fmt: skip
    assert seen.calls == first  # a new pass counts from 0


def test_passes_can_be_counted_in_one_row() -> None:
    model, seen = Twice(), Seen()
    with Visiting(model, seen, [Stop("layer", model.layer, inputs=False)], passes_apart=False):
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert [number for _, _, number, _, _ in seen.calls] == [0, 1, 2, 3]


def test_a_visitor_s_value_takes_the_place_of_the_model_s() -> None:
    model, x = Twice(), torch.randn(2, 3)
    expected = model.act(model.layer(model.layer(x) * 2) * 2)
    with Visiting(model, Seen(double="layer"), stops(model)):
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), model.act(model.layer(model.layer(x))))


def test_a_checkpoint_s_repetition_has_the_numbers_of_the_calls_it_repeats() -> None:
    model, seen = Checkpointed(), Seen()
    with Visiting(model, seen, [Stop("layer", model.layer, inputs=False)]):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert [(number, again) for _, _, number, again, _ in seen.calls] == [
        (0, False), (1, False), (0, True),
    ]  # fmt: skip
    # The checkpoint stops as soon as it has what backward needs, so the second call is not repeated.


def test_leaving_removes_every_hook_even_if_the_forward_raised() -> None:
    model = Twice()
    with pytest.raises(RuntimeError), Visiting(model, Seen(), stops(model)):
        assert hooks_on(model)
        model(torch.ones(2, 7))
    assert hooks_on(model) == 0


def test_a_module_that_raised_half_way_is_nobody_s_parent_afterwards() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(7, 7), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    model, seen = Careful(), Seen()
    with Visiting(model, seen, stops(model)):
        model(torch.ones(2, 3))
    assert ("in", "good", 0, False, "") in seen.calls
    assert seen.calls[-1] == ("out", "", 0, False, None)


def test_copies_and_pickles_of_a_visited_model_are_not_visited() -> None:
    model, seen = Twice(), Seen()
    with Visiting(model, seen, stops(model)):
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for other in (copied, loaded):
            other(torch.ones(2, 3))
    assert seen.calls == []


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_other_arguments_and_another_output(way: Any) -> None:
    model, x = Twice(), torch.randn(2, 3)
    walker = Hooks(model, way)
    walker.before(model.act, lambda args, kwargs, replayed: ((args[0] + 1,), kwargs), replays=True)
    walker.after(model.act, lambda output, replayed: output * 3, replays=True)
    changed = model(x)
    walker.remove()
    plain = model.layer(model.layer(x))
    assert torch.equal(changed, torch.relu(plain + 1) * 3)
    assert torch.equal(model(x), torch.relu(plain))


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_begins_before_and_ends_after_everything_in_it_also_when_it_raises(way: Any) -> None:
    model = Twice()
    events: list[str] = []
    walker = Hooks(model, way)
    walker.after(model, lambda output: events.append("root"))
    walker.around(lambda: events.append("begin"), lambda: events.append("end"))
    model(torch.ones(2, 3))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    walker.remove()
    model(torch.ones(2, 3))
    assert events == ["begin", "root", "end", "begin", "end"]


def test_a_class_that_takes_hooks_in_its_own_way_is_asked_for_both_ends_of_a_pass() -> None:
    class Registering(Twice):
        def register_forward_hook(self, *given: Any, **options: Any) -> Any:
            events.append("registered")
            return super().register_forward_hook(*given, **options)

    events: list[str] = []
    model = Registering()
    walker = Hooks(model)
    walker.around(lambda: events.append("begin"), lambda: events.append("end"))
    model(torch.ones(2, 3))
    walker.remove()
    model(torch.ones(2, 3))
    assert events == ["registered", "begin", "end"]
    assert not hooks_on(model)


def test_one_removal_that_fails_does_not_keep_the_others_on() -> None:
    class Broken:
        def remove(self) -> None:
            raise OSError("no")

    model = Twice()
    walker = Hooks(model)
    walker.after(model.act, lambda output: None)
    walker.keep(Broken())
    walker.after(model.layer, lambda output: None)
    with pytest.raises(OSError, match="no"):
        walker.remove()
    assert hooks_on(model) == 0
