"""Each extension point has a contract: an honest extension passes it, a faulty one fails with a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap import testing
from torchtap.errors import PlanError
from torchtap.reduce import reduction_from_spec
from torchtap.schedule import Schedule
from torchtap.spi import Call, StepListener, Visitor


class Evenly(Schedule):
    """Every second step, said by an own class."""

    by_phase = False

    def live(self, moment: tt.Moment) -> bool:
        return moment.step % 2 == 0

    def spec(self) -> dict[str, object]:
        return {"evenly": True}


class TestAnOwnSchedule(testing.ScheduleContract):
    def schedule(self) -> Schedule:
        return Evenly()


class TestABuiltInSchedule(testing.ScheduleContract):
    def schedule(self) -> Schedule:
        return tt.Every(4, 1) | tt.Steps([2, 7])


class Names:
    """A visitor that notes the paths of calls."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def before(self, call: Call, args: Any, kwargs: Any) -> None:
        self.paths.append(call.path)

    def after(self, call: Call, output: object) -> None:
        self.paths.append(call.path)


class TestAVisitor(testing.VisitorContract):
    def visitor(self) -> Visitor:
        return Names()


class TestTheEagerForm(testing.FormContract):
    def form(self, model: nn.Module) -> Any:
        return model


class TestTheTracedForm(testing.FormContract):
    def form(self, model: nn.Module) -> Any:
        return torch.jit.trace(model, self.inputs())


class TestAStepListener(testing.StepListenerContract):
    def listener(self) -> StepListener:
        return StepListener()


@tt.register
@dataclass(frozen=True)
class Total(tt.Reduction[Tensor]):
    name: ClassVar[str] = "total of a test"

    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        total = value.detach().double().sum()
        return total if state is None else state + total

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def result(self, state: Tensor) -> dict[str, float | Tensor]:
        return {"total": float(state)}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}


class TestARegisteredReduction(testing.ReductionContract):
    def reduction(self) -> Total:
        return Total()

    def reference(self, values: Any) -> dict[str, float | Tensor]:
        return {"total": sum(float(value.double().sum()) for value in values)}


def test_a_registered_sink_and_reduction_are_found_by_name() -> None:
    @tt.register
    class Unnamed(tt.MemorySink):  # type: ignore[misc]
        name = "own sink of a test"

    assert isinstance(tt.make_sink("own sink of a test"), Unnamed)
    assert reduction_from_spec(Total().spec()) == Total()


@pytest.mark.parametrize("thing", [object(), 3, nn.Linear])
def test_what_is_no_extension_is_refused(thing: object) -> None:
    with pytest.raises(PlanError, match="is no extension"):
        tt.register(thing)


class LateSchedule(Evenly):
    def earliest(self, moment: tt.Moment) -> int:
        return moment.step + 5


class Meddling(Names):
    def after(self, call: Call, output: Any) -> Any:
        return output + 1


class Frozen(StepListener):
    def ready(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad.zero_()


FAULTY: dict[str, tuple[type, str, object, str]] = {
    "schedule": (testing.ScheduleContract, "schedule", LateSchedule(), "is live"),
    "visitor": (testing.VisitorContract, "visitor", Meddling(), "the visitor changed the output"),
    "form": (testing.FormContract, "form", nn.Sequential(nn.Linear(4, 2)), "without a reason|another value"),
    "step listener": (testing.StepListenerContract, "listener", Frozen(), "differs after three steps"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_extension_fails_its_contract_with_a_reason(name: str) -> None:
    contract, method, faulty, reason = FAULTY[name]
    case = type("Case", (contract,), {method: lambda self, *_: faulty})()
    failures = []
    for test in (getattr(case, each) for each in dir(case) if each.startswith("test_")):
        try:
            test()
        except AssertionError as error:
            failures.append(str(error))
    assert any(re.search(reason, each) for each in failures), failures
    assert all(failures), "a failure has no message"
