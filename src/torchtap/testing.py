"""Contracts that an extension's tests subclass, to be held to what the built-in ones are held to.

    class TestMyReduction(ReductionContract):
        def reduction(self):
            return MyReduction()

        def reference(self, values):
            return {"total": sum(float(value.double().sum()) for value in values)}

pytest then runs every test of the contract. Nothing here imports pytest.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtap.reduce import Reduction, Result, reduction_from_spec

__all__ = ["ReductionContract"]


class ReductionContract:
    """What every reduction keeps to. Fill in ``reduction`` and ``reference``, override what does not fit."""

    rtol: float = 1e-9
    """How far, relatively, numbers and float tensors may be from the reference."""

    atol: float = 1e-12

    def reduction(self) -> Reduction[Any]:
        """The reduction under test."""
        raise NotImplementedError

    def reference(self, values: Sequence[Tensor]) -> Result:
        """What the result has to be when these values came in this order: plain code, no folding."""
        raise NotImplementedError

    def streams(self) -> Iterable[list[Tensor]]:
        """Streams of values to try: of several dtypes and layouts, some with values that are not finite."""
        make = torch.Generator().manual_seed(0)
        plain = torch.randn(64, 6, generator=make, dtype=torch.float64)
        yield [plain.float()]
        yield list(torch.split(plain.float(), [1, 30, 2, 31]))
        yield [plain.to(torch.bfloat16)[:32], plain.to(torch.bfloat16)[32:]]
        yield [plain[:, ::2].t().contiguous().t(), plain[::3, ::2]]
        yield [(plain * 10).to(torch.int64), (plain * 20).to(torch.int64)]
        strange = plain.clone()
        strange[3, 2], strange[5, 0], strange[40, 1] = torch.nan, torch.inf, -torch.inf
        yield list(torch.split(strange, 20))

    def fold(self, values: Iterable[Tensor]) -> Any:
        """The state after all values."""
        reduction, state = self.reduction(), None
        for value in values:
            state = reduction.update(state, value)
        return state

    def check(self, found: Result, wanted: Result) -> None:
        """Assert that two results agree: names, shapes, and numbers within the tolerances."""
        assert set(found) == set(wanted), f"the result has {sorted(found)}, the reference {sorted(wanted)}"
        for name, expected in wanted.items():
            actual = found[name]
            one, other = (torch.as_tensor(side, dtype=None).to("cpu") for side in (actual, expected))
            if one.is_floating_point() or other.is_floating_point():
                one, other = one.double(), other.double()
            torch.testing.assert_close(
                one,
                other,
                rtol=self.rtol,
                atol=self.atol,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
            )

    def test_the_result_equals_the_reference(self) -> None:
        for values in self.streams():
            self.check(self.reduction().result(self.fold(values)), self.reference(values))

    def test_every_split_merges_to_the_same_result(self) -> None:
        for values in self.streams():
            wanted = self.reference(values)
            for cut in range(1, len(values)):
                left, right = self.fold(values[:cut]), self.fold(values[cut:])
                reduction = self.reduction()
                self.check(reduction.result(reduction.merge(left, right)), wanted)

    def test_the_values_are_left_as_they_were(self) -> None:
        for values in self.streams():
            before = [value.clone() for value in values]
            self.fold(values)
            for value, was in zip(values, before, strict=True):
                assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(was)), "update changed its value"

    def test_what_happens_to_a_value_later_does_not_reach_the_state(self) -> None:
        for values in self.streams():
            wanted = self.reference(values)
            reduction, state = self.reduction(), None
            for value in values:
                passing = value.clone()
                state = reduction.update(state, passing)
                passing.zero_()
            assert state is not None
            self.check(reduction.result(state), wanted)

    def test_reading_the_result_does_not_end_the_fold(self) -> None:
        for values in self.streams():
            reduction, state = self.reduction(), None
            for value in values:
                state = reduction.update(state, value)
                reduction.result(state)
            assert state is not None
            self.check(reduction.result(state), self.reference(values))

    def test_a_value_that_requires_grad_is_reduced_without_it(self) -> None:
        value = torch.linspace(-2, 3, 24).reshape(6, 4).requires_grad_()
        reduction = self.reduction()
        result = reduction.result(reduction.update(None, value * 1))
        for name, number in result.items():
            assert not (isinstance(number, Tensor) and number.requires_grad), f"{name} drags the graph along"
        self.check(result, self.reference([value.detach()]))

    def test_the_result_is_named_numbers_and_tensors_on_the_host(self) -> None:
        result = self.reduction().result(self.fold([torch.linspace(-2, 3, 24).reshape(6, 4)]))
        assert result, "the result is empty"
        for name, number in result.items():
            assert isinstance(name, str)
            assert isinstance(number, float | Tensor), f"{name} is a {type(number).__name__}"
            assert not isinstance(number, Tensor) or number.device.type == "cpu", f"{name} is not on the host"

    def test_the_spec_is_json_and_says_which_reduction_it_is(self) -> None:
        reduction = self.reduction()
        spec = reduction.spec()
        assert json.loads(json.dumps(spec)) == spec, "the spec does not survive JSON"
        assert spec["reduction"] == reduction.name

    def test_the_spec_brings_the_reduction_back(self) -> None:
        reduction = self.reduction()
        assert reduction_from_spec(reduction.spec()) == reduction

    def test_equal_reductions_are_equal_and_hash_equal(self) -> None:
        one, other = self.reduction(), copy.copy(self.reduction())
        assert one == other
        assert hash(one) == hash(other)
