"""The distance of two tensors: each measure against its formula in plain numpy, in every dtype, in little memory."""

from __future__ import annotations

import math
import resource

import numpy as np
import pytest
import torch

from torchtap import CompareError
from torchtap.comparison import measures
from torchtap.comparison.measures import ValueStream, measure, measure_streams


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the native kernel, and as if it had not been built."""
    if request.param == "numpy":
        for module in (measures,):
            monkeypatch.setattr(module, "native", None)
    elif measures.native is None:
        pytest.skip("the native kernel is not built here")


def pair(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (7, 11, 13)
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(shape, generator=generator)
    target = reference + 0.01 * torch.randn(shape, generator=generator)
    return reference.to(dtype), target.to(dtype)


@pytest.mark.parametrize("chunk", [1 << 17, 64, 7])
def test_every_measure_is_its_formula(chunk: int) -> None:
    reference, target = pair()
    found = measure(reference, target, chunk=chunk, atol=0.005, rtol=0.01)
    r, t = reference.numpy().astype(np.float64).ravel(), target.numpy().astype(np.float64).ravel()
    d = np.abs(t - r)
    spacing = np.spacing(np.abs(reference.numpy().ravel())).astype(np.float64)
    expected = {
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "max_rel": (d / (np.abs(r) + 1e-8)).max(),
        "mean_rel": (d / (np.abs(r) + 1e-8)).mean(),
        "rel_l2": np.linalg.norm(d) / np.linalg.norm(r),
        "rel_linf": d.max() / np.abs(r).max(),
        "cosine": t @ r / (np.linalg.norm(t) * np.linalg.norm(r)),
        "cosine_scaled": 1 - 2 * (t * r).sum() / (t * t + r * r).sum(),
        "sqnr_db": 20 * np.log10(np.linalg.norm(r) / np.linalg.norm(d)),
        "max_ulp": (d / spacing).max(),
        "mean_ulp": (d / spacing).mean(),
        "within": (d <= 0.005 + 0.01 * np.abs(r)).mean(),
        "mismatched": (r != t).mean(),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert found.worst == tuple(int(i) for i in np.unravel_index(d.argmax(), reference.shape))
    assert found.worst_target == float(target[found.worst])
    assert 0.0 < found.histogram_distance < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_the_native_sums_are_those_of_numpy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, target = pair(shape=(13, 1000))
    reference, target = (reference * 100).to(dtype), (target * 100).to(dtype)
    if dtype.is_floating_point:
        reference[3, 5] = target[3, 5] = math.nan
        target[4, 7] = math.inf
        reference[0, 0] = 0.0
    native = measure(reference, target).as_dict()
    monkeypatch.setattr(measures, "native", None)
    for name, value in measure(reference, target).as_dict().items():
        assert native[name] == pytest.approx(value, rel=1e-12), name


def test_threads_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, target = pair(shape=(300_000,))
    whole = measure(reference, target).as_dict()
    monkeypatch.setattr(measures, "_PER_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for name, value in measure(reference, target).as_dict().items():
        assert whole[name] == pytest.approx(value, rel=1e-12), name
    streams = [
        ValueStream(tuple(t.shape), "float32", iter(_pieces(t, size)))
        for t, size in ((reference, 4096), (target, 3000))
    ]
    for name, value in measure_streams(*streams).as_dict().items():
        if name != "histogram_distance":  # sampled at slightly other places
            assert whole[name] == pytest.approx(value, rel=1e-12), name


def _pieces(value: torch.Tensor, size: int) -> list[memoryview]:
    raw = memoryview(value.numpy().tobytes())
    return [memoryview(bytearray(raw[start : start + 4 * size])) for start in range(0, len(raw), 4 * size)]


def test_strides_do_not_matter() -> None:
    reference, target = pair(shape=(6, 10, 14))
    plain = measure(reference, target, chunk=50)
    turned = measure(reference.permute(2, 0, 1).contiguous().permute(1, 2, 0), target, chunk=50)
    assert turned.as_dict() == plain.as_dict() | {k: pytest.approx(v) for k, v in plain.as_dict().items()}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    ],
)  # fmt: skip
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    values = (
        torch.arange(24).reshape(4, 6) % 2 if dtype == torch.bool else torch.arange(24).reshape(4, 6) % 15
    )
    reference = values.to(dtype)
    assert measure(reference, reference.clone()).identical
    target = reference.clone()
    target[2, 3] = (
        ~target[2, 3] if dtype == torch.bool else target[2, 3].to(torch.complex64).real.to(torch.int64) + 1
    )
    found = measure(reference, target)
    assert not found.identical
    assert found.worst[:2] == (2, 3)
    assert found.max_abs == 1.0


def test_one_unit_in_the_last_place_is_one_ulp_at_the_coarser_dtype() -> None:
    reference = torch.tensor([1.0, 3.0, -100.0], dtype=torch.bfloat16)
    target = torch.nextafter(reference, torch.tensor(math.inf, dtype=torch.bfloat16))
    assert measure(reference, target).max_ulp == 1.0
    assert measure(reference.float(), target).max_ulp == 1.0


def test_a_wrong_scale_is_seen_though_the_cosine_does_not() -> None:
    reference, _ = pair()
    found = measure(reference, 2 * reference)
    assert found.cosine == pytest.approx(1.0)
    assert found.cosine_scaled == pytest.approx(0.2)


def test_nan_and_inf_are_counted_and_left_out() -> None:
    reference, target = pair()
    reference[0, 0, 0] = target[0, 0, 0] = math.nan
    reference[0, 0, 1] = target[0, 0, 1] = math.inf
    agreeing = measure(reference, target)
    assert agreeing.masks_differ == 0
    assert agreeing.nans == (1, 1)
    assert agreeing.infs == (1, 1)
    assert math.isfinite(agreeing.rel_l2)
    assert agreeing.compared == agreeing.count - 2
    target[3, 3, 3] = math.nan
    assert measure(reference, target).masks_differ == 1
    assert measure(reference, reference.clone()).identical


def test_opposite_infinities_are_a_difference() -> None:
    found = measure(torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]))
    assert found.masks_differ == 1
    assert not found.identical


def test_all_nan_is_not_called_equal_evidence() -> None:
    nothing = torch.full((4,), math.nan)
    found = measure(nothing, nothing.clone())
    assert found.nothing_finite
    assert math.isnan(found.rel_l2)


def test_zero_against_something_is_infinitely_far_and_against_zero_is_equal() -> None:
    zero = torch.zeros(5)
    assert measure(zero, torch.ones(5)).rel_l2 == math.inf
    assert math.isnan(measure(zero, torch.ones(5)).cosine)
    assert measure(zero, zero.clone()).rel_l2 == 0.0
    assert measure(zero, zero.clone()).cosine == 1.0


def test_empty_and_scalar_tensors_are_measured() -> None:
    assert measure(torch.empty(0, 3), torch.empty(0, 3)).identical
    assert measure(torch.tensor(2.0), torch.tensor(3.0)).rel_l2 == 0.5


def test_sparse_and_quantized_values_are_taken_as_the_numbers_they_stand_for() -> None:
    reference, _ = pair(shape=(6, 6))
    assert measure(reference, reference.to_sparse()).identical
    stored = torch.quantize_per_tensor(reference, 0.1, 0, torch.qint8)
    assert 0 < measure(reference, stored).max_abs <= 0.0501 + max(0.0, float(reference.abs().max()) - 12.7)


def test_different_shapes_are_refused_with_advice() -> None:
    with pytest.raises(CompareError, match="permute, slice or reshape"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))


def test_a_large_tensor_needs_little_more_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.empty(16 << 20).uniform_(generator=generator)  # 64 MiB
    target = reference.clone().view(64, -1).t().contiguous().t()  # and its twin with other strides
    measure(reference[: 1 << 20], reference[: 1 << 20])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert measure(reference, reference.clone().mul_(1.0001)).max_abs > 0  # the clone itself is 64 MiB
    assert measure(reference.view(64, -1), target).identical
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (64 + 32) * 1024


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1e-200, 1e-170, 1e200, 1e300])
def test_squares_beyond_float64_neither_overflow_nor_vanish(size: float) -> None:
    reference = torch.tensor([1.0, -2.0, 3.0] * 300, dtype=torch.float64) * size
    opposite = measure(reference, -reference)
    assert opposite.cosine == pytest.approx(-1)
    assert opposite.rel_l2 == pytest.approx(2)
    assert opposite.sqnr_db == pytest.approx(-6.0206, rel=1e-4)
    assert measure(reference, 2 * reference).rel_l2 == pytest.approx(1)
    assert measure(reference, reference).cosine == 1
    assert measure(reference, reference).reference_l2 == pytest.approx(size * math.sqrt(14 * 300))
    some = reference.clone()
    some[7] = torch.nan
    assert measure(some, -some).cosine == pytest.approx(-1)
    mixed = torch.cat([reference, torch.ones(5000, dtype=torch.float64)])
    larger = max(size, 1.0)
    assert measure(mixed, mixed * 2).rel_l2 == pytest.approx(1)
    assert measure(mixed, mixed * 2).reference_l2 >= larger


@pytest.mark.usefixtures("way")
def test_the_largest_numbers_have_their_distance_in_units_of_the_last_place() -> None:
    largest = torch.tensor([torch.finfo(torch.float64).max, 2.0**1023], dtype=torch.float64)
    below = torch.nextafter(largest, torch.zeros(2, dtype=torch.float64))
    assert measure(largest, below).max_ulp == 1.0
    assert measure(largest[:1], -largest[:1]).max_ulp > 0


def test_flushing_small_numbers_to_zero_does_not_reach_the_sums() -> None:
    small = torch.full((999,), 5, dtype=torch.int32).view(torch.float32)
    if measures.native is None or not torch.set_flush_denormal(True):
        pytest.skip("no native kernel, or a processor that cannot flush")
    try:
        found = measure(small, torch.zeros(999))
    finally:
        torch.set_flush_denormal(False)
    assert found.max_abs == 5 * 2.0**-149
    assert found.mismatched == 1


@pytest.mark.usefixtures("way")
def test_a_real_tensor_is_compared_with_a_complex_one() -> None:
    real = torch.randn(1001)
    assert measure(real, real.to(torch.complex64)).identical
    assert measure(real * (1 + 1j), real).rel_l2 == pytest.approx(1 / math.sqrt(2))
