"""Branches and loops of a compiled model: nothing fails, what is around them comes, and the rest has its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.receive import reasons


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.yes, self.no = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        found: Tensor = torch.cond(
            x.sum() > 0, lambda t: self.yes(t).relu(), lambda t: self.no(t).tanh(), (x,)
        )
        return found


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        count = torch.zeros((), dtype=torch.int64)
        _, x = while_loop(
            lambda n, _: n < 3, lambda n, t: (n + 1, self.inside(t).relu()), (count, self.before(x))
        )
        return x


@pytest.mark.parametrize("learning", [True, False])
def test_a_compiled_branch_is_told_and_the_rest_comes(learning: bool) -> None:
    torch.manual_seed(0)
    plain, x = Branching(), torch.randn(3, 4)
    model: Any = torch.compile(plain, backend="aot_eager")
    expected = model(x).detach()
    for _ in range(2):  # the second time nothing is traced
        with torch.set_grad_enabled(learning), tt.capture(model, "*:output") as seen:
            found = model(x)
        assert torch.equal(found, expected)
        assert set(dict(seen.items())) == {"before:output", ":output"}
        assert torch.equal(seen["before:output"], plain.before(x))
        assert torch.equal(seen[":output"], expected)
        assert {missing.site: missing.reason for missing in seen.coverage()} == {
            "yes:output": reasons.IN_A_BRANCH,
            "no:output": reasons.IN_A_BRANCH,
        }


def test_a_compiled_loop_is_told_and_the_rest_comes() -> None:
    torch.manual_seed(0)
    model: Any = torch.compile(Looping(), backend="aot_eager")
    with torch.no_grad(), tt.capture(model, "*:output") as seen:
        found = model(torch.randn(3, 4))
    assert set(dict(seen.items())) == {"before:output", ":output"}
    assert torch.equal(seen[":output"], found)
    assert [str(missing) for missing in seen.coverage()] == [f"inside:output: {reasons.IN_A_BRANCH}"]


def test_an_instrumented_branch_is_exported_with_its_sites() -> None:
    torch.manual_seed(0)
    plain, x = Branching(), torch.randn(3, 4)
    program = torch.export.export(tt.instrument(plain, "*:output"), (x,)).module()
    with torch.no_grad(), tt.capture(program, "*:output") as seen:
        program(x)
    assert {"before:output", ":output"} < set(dict(seen.items()))
    assert {"yes:output", "no:output"} & set(dict(seen.items()))
