"""Full: the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Full, Reduction, Result, reduction_from_spec
from torchtap.testing import ReductionContract


class TestFull(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[list[Tensor]]:
        return Full()

    def reference(self, values: Sequence[Tensor]) -> Result:
        return {"value": torch.cat(list(values))}

    def streams(self) -> list[list[Tensor]]:
        return [values for values in super().streams() if len({value.shape[1:] for value in values}) == 1]


class TestFullOfASliceInHalfPrecision(TestFull):
    def reduction(self) -> Reduction[list[Tensor]]:
        return Full(dtype=torch.float16, slice="..., 1:3")

    def reference(self, values: Sequence[Tensor]) -> Result:
        return {"value": torch.cat([value[..., 1:3].half() for value in values])}


def kept(reduction: Full, *values: Tensor) -> Tensor:
    state = None
    for value in values:
        state = reduction.update(state, value)
    assert state is not None
    result = reduction.result(state)["value"]
    assert isinstance(result, Tensor)
    return result


def test_numbers_of_no_dimension_become_a_vector() -> None:
    assert kept(Full(), torch.tensor(1.0), torch.tensor(2.0)).tolist() == [1.0, 2.0]
    assert kept(Full(), torch.tensor(1.0)).shape == ()


def test_values_that_do_not_join_say_so() -> None:
    with pytest.raises(ReductionError, match=r"\(2, 3\).*\(2, 4\).*slice"):
        kept(Full(), torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ReductionError, match="int64"):
        kept(Full(), torch.ones(2), torch.ones(2, dtype=torch.int64))


def test_values_of_other_lengths_join_along_the_first_dimension() -> None:
    assert kept(Full(), torch.ones(2, 3), torch.ones(5, 3)).shape == (7, 3)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("0:4, ..., ::2", "0:4, ..., ::2"),
        ((slice(0, 4), ..., slice(None, None, 2)), "0:4, ..., ::2"),
        (3, "3"),
        (slice(2), ":2"),
        ("-1", "-1"),
    ],
)
def test_an_index_has_one_spelling_however_it_was_given(given: object, spelled: str) -> None:
    reduction = Full(slice=given)  # type: ignore[arg-type]
    assert reduction.slice == spelled
    assert reduction == Full(slice=spelled)
    assert reduction_from_spec(reduction.spec()) == reduction
    value = torch.arange(5 * 3 * 4.0).reshape(5, 3, 4)
    assert torch.equal(kept(reduction, value), kept(Full(slice=given), value))  # type: ignore[arg-type]


def test_what_cannot_be_an_index_or_a_dtype_is_refused_at_once() -> None:
    with pytest.raises(ReductionError, match="no part of an index"):
        Full(slice="first")
    with pytest.raises(ReductionError, match="no part of an index"):
        Full(slice="1:2:3:4")
    with pytest.raises(ReductionError, match="no such dtype"):
        Full(dtype="float17")
    with pytest.raises(ReductionError, match="no such dtype"):
        Full(dtype="nn")


def test_a_slice_that_does_not_fit_names_the_shape() -> None:
    with pytest.raises(ReductionError, match=r"\(2, 2\)"):
        kept(Full(slice="0, 0, 0"), torch.ones(2, 2))


def test_what_is_kept_holds_no_more_memory_than_it_shows() -> None:
    for value in (torch.ones(1).expand(50, 50), torch.ones(1000, 10)[:, :1], torch.ones(100)[::10]):
        found = kept(Full(), value)
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()


def test_float8_and_complex_are_kept_as_they_are() -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bool):
        value = torch.randn(4, 3).to(dtype)
        found = kept(Full(), value, value)
        assert found.dtype is dtype
        assert found.shape == (8, 3)
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(kept(Full(), conjugated), conjugated.resolve_conj())


class TestFullByReference(TestFull):
    """Where nothing is changed in place, a reference is as good as a copy."""

    def reduction(self) -> Reduction[list[Tensor]]:
        return Full(copy=False)  # type: ignore[return-value]

    def test_what_happens_to_a_value_later_does_not_reach_the_state(self) -> None:
        for values in self.streams():
            value = values[0].clone()
            state = self.reduction().update(None, value)
            value.zero_()
            with pytest.raises(ReductionError, match="changed in place"):
                self.reduction().result(state)


def test_a_reference_is_the_value_itself_until_it_is_changed() -> None:
    value = torch.arange(6.0).view(2, 3)
    by_reference = Full(copy=False)
    state = by_reference.update(None, value)
    kept_value = by_reference.result(state)["value"]
    assert isinstance(kept_value, Tensor)
    assert kept_value.data_ptr() == value.data_ptr()
    value[0, 1] = 7  # through a view of it
    with pytest.raises(ReductionError, match=r"shape \(2, 3\).*changed in place"):
        by_reference.result(state)


def test_a_reference_to_memory_that_was_freed_is_refused() -> None:
    value = torch.arange(100.0)
    state = Full(copy=False).update(None, value)
    value.untyped_storage().resize_(0)
    with pytest.raises(ReductionError, match="changed in place"):
        Full(copy=False).result(state)


def test_what_has_no_version_is_copied() -> None:
    with torch.inference_mode():
        value = torch.ones(3)
        state = Full(copy=False).update(None, value)
        value.zero_()
    assert kept_of(state) == [1, 1, 1]


def kept_of(state: list[Any]) -> list[float]:
    value = Full(copy=False).result(state)["value"]
    assert isinstance(value, Tensor)
    return value.tolist()


def test_slices_refer_too_and_other_dtypes_are_copies() -> None:
    value = torch.arange(6.0)
    part = Full(copy=False, slice="2:4")
    half = Full(copy=False, dtype="float16")
    states = part.update(None, value), half.update(None, value)
    assert part.result(states[0])["value"].tolist() == [2, 3]  # type: ignore[union-attr]
    value.add_(1)
    with pytest.raises(ReductionError):
        part.result(states[0])
    assert half.result(states[1])["value"].tolist() == [0, 1, 2, 3, 4, 5]  # type: ignore[union-attr]


def test_references_are_written_into_a_plan_and_read_again() -> None:
    assert Full().spec().keys() == {"reduction", "dtype", "slice", "device"}
    assert reduction_from_spec(Full(copy=False).spec()) == Full(copy=False)
    assert reduction_from_spec(Full().spec()) == Full() != Full(copy=False)
