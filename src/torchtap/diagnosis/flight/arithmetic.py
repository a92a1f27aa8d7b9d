"""The settings of torch that decide the last bit of a result: threads, precision of products, determinism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["arithmetic", "with_arithmetic"]


def arithmetic() -> dict[str, object]:
    """How this process computes."""
    return {
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


@contextmanager
def with_arithmetic(settings: dict[str, object]) -> Iterator[None]:
    """Compute as these settings say, and then as before."""
    before = arithmetic()
    _set({**before, **settings})
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    torch.set_num_threads(int(settings["threads"]))
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.use_deterministic_algorithms(bool(settings["deterministic"]))
    torch.backends.cudnn.benchmark = bool(settings["cudnn_benchmark"])
