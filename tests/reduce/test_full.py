"""Full: the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence

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
