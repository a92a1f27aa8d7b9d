"""Random numbers: where the generators stand that a model draws from, and back to there.

Python's, numpy's and torch's own generators, the last on the host and on every CUDA device that is in use. Generators
that a training made for itself are its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

__all__ = ["RandomState"]


@final
@dataclass(frozen=True, slots=True)
class RandomState:
    """Where the generators stood."""

    python: Any
    numpy: Any
    host: Tensor
    devices: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> Self:
        """Where they stand."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = tuple(torch.cuda.get_rng_state_all()) if in_use else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def put_back(self) -> None:
        """Go on from there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.devices and torch.cuda.device_count() == len(self.devices):
            torch.cuda.set_rng_state_all(list(self.devices))

    def plain(self) -> dict[str, Any]:
        """As numbers and tensors, for a file."""
        name, key, position, has_gauss, gauss = self.numpy
        version, numbers, following = self.python
        return {
            "python": [version, list(numbers), following],
            "numpy": [name, key.tolist(), int(position), int(has_gauss), float(gauss)],
            "host": self.host,
            "devices": list(self.devices),
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """The opposite of `plain`."""
        version, numbers, following = data["python"]
        name, key, *rest = data["numpy"]
        generator = (name, np.array(key, dtype=np.uint32), *rest)
        return cls((version, tuple(numbers), following), generator, data["host"], tuple(data["devices"]))
