"""Tensors in ``.pt`` files, read by torch: as tensors, and what `saved` leaves to it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torchtap.comparison.recorded.archives import check_archive
from torchtap.errors import RunCorruptError, RunNotFoundError

__all__ = ["load_tensor"]


def load_tensor(path: Path) -> Tensor:
    """Read one tensor from a ``.pt`` file without running any code that it may hold."""
    try:
        check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RunNotFoundError(f"there is no file {path}") from error
    except RunCorruptError:
        raise
    except Exception as error:
        raise RunCorruptError(
            f"{path} cannot be read as a tensor; was it written by torch.save? ({_first_line(error)})"
        ) from error
    if isinstance(loaded, (tuple, list)) and loaded and isinstance(loaded[0], Tensor):
        loaded = loaded[0]
    if not isinstance(loaded, Tensor):
        raise RunCorruptError(f"{path} holds a {type(loaded).__name__} where a tensor was expected")
    return loaded


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
