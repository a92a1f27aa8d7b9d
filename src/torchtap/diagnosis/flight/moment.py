"""The kept moment of a dump as a file: batch, weights and random state, to be run again.

It is one file for each rank, ``moment/rank-0.pt`` beside the run's own. It holds tensors, numbers and text in plain
containers, so that ``torch.load`` reads it without running code from it. An argument that is an object of another kind
is kept as the tensors in it; where even that is not possible, it is None, and ``notes`` says so.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from torchtap.diagnosis.flight.arithmetic import arithmetic
from torchtap.diagnosis.flight.passes import Autocast, Pass, StepPasses
from torchtap.errors import RunFormatError, RunNotFoundError
from torchtap.hooks.structure import map_leaves, plain
from torchtap.plan.sites import unwrap
from torchtap.session.random_state import RandomState

__all__ = ["StepSnapshot"]

_FORMAT = 1
_SIMPLE = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepSnapshot:
    """A step as it was just before the optimizer's update."""

    step: int
    reason: str
    steps: tuple[StepPasses, ...]  # the last is the step itself, those before it came before it
    weights: Mapping[str, Mapping[str, Tensor]]  # of each model; nothing where they were changed already
    notes: tuple[str, ...] = ()
    arithmetic: dict[str, object] = field(default_factory=arithmetic)

    @property
    def passes(self) -> list[Pass]:
        """Those of the step itself."""
        return self.steps[-1].passes if self.steps and self.steps[-1].step == self.step else []

    def save(self, folder: Path, rank: int) -> Path:
        """Write the file; a half-written one is never seen under its name."""
        path = folder / "moment" / f"rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # a link there is not written through
        torch.save(self._plain(), part)
        os.replace(part, path)
        return path

    def _plain(self) -> dict[str, object]:
        notes = list(self.notes)
        return {
            "format": _FORMAT,
            "step": self.step,
            "reason": self.reason,
            "steps": [
                {
                    "step": each.step,
                    "dropped": each.dropped,
                    "passes": [_plain_pass(one, notes) for one in each.passes],
                }
                for each in self.steps
            ],
            "weights": {name: _on_host(state) for name, state in self.weights.items()},
            "notes": list(dict.fromkeys(notes)),
            "arithmetic": self.arithmetic,
        }

    @classmethod
    def load(cls, folder: str | os.PathLike[str], rank: int = 0) -> Self:
        """Read the file of one rank. No code of whoever wrote it is run."""
        path = Path(folder) / "moment" / f"rank-{rank}.pt"
        if not path.is_file():
            raise RunNotFoundError(
                f"there is no kept moment at {path}: a dump of a flight recorder has one, any other run has none"
            )
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
            if data["format"] != _FORMAT:
                raise RunFormatError(
                    f"{path} has format {data['format']!r}; this torchtap reads {_FORMAT}: use a newer one"
                )
            steps = tuple(
                StepPasses(each["step"], [_read_pass(one) for one in each["passes"]], each["dropped"])
                for each in data["steps"]
            )
            notes = tuple(data["notes"])
            return cls(data["step"], data["reason"], steps, data["weights"], notes, data["arithmetic"])
        except RunFormatError:
            raise
        except Exception as error:
            raise RunFormatError(f"{path} is no kept moment that can be read: {error}") from error

    def load_weights(self, models: Mapping[str, nn.Module]) -> None:
        """Put the kept weights into models."""
        for name, model in models.items():
            unwrap(model).load_state_dict(self.weights[name])


def _plain_pass(each: Pass, notes: list[str]) -> dict[str, object]:
    return {
        "model": each.model,
        "args": [_storable(value, f"argument {number}", notes) for number, value in enumerate(each.args)],
        "kwargs": {name: _storable(value, name, notes) for name, value in each.kwargs.items()},
        "random": each.random.plain(),
        "modes": list(each.modes),
        "autocast": [list(one) for one in each.autocast],
        "buffers": [None if one is None else one.cpu() for one in each.buffers],
        "numbers": [[position, name, value] for (position, name), value in each.numbers.items()],
        "nbytes": each.nbytes,
        "seeds": {
            task: {leaf: seed.cpu() for leaf, seed in seeds.items()} for task, seeds in each.seeds.items()
        },
    }


def _read_pass(data: dict[str, Any]) -> Pass:
    return Pass(
        data["model"],
        tuple(data["args"]),
        dict(data["kwargs"]),
        RandomState.from_plain(data["random"]),
        tuple(data["modes"]),
        tuple(Autocast(device, dtype) for device, dtype in data["autocast"]),
        tuple(data["buffers"]),
        {(position, name): value for position, name, value in data["numbers"]},
        data["nbytes"],
        data["seeds"],
    )


def _storable(value: object, what: str, notes: list[str]) -> object:
    """An argument in plain containers; what cannot be had is None, and noted."""

    def other(one: object) -> Any:
        if isinstance(one, _SIMPLE):
            return one
        notes.append(f"{what}: a {type(one).__name__} cannot be kept in a file and is None there")
        return None

    whole = map_leaves(plain(value), lambda _, tensor: _to_host(tensor), other)
    if _is_safe(whole):
        return whole
    notes.append(f"{what}: a {type(value).__name__} cannot be kept in a file and is None there")
    return None


def _is_safe(value: object) -> bool:
    small = map_leaves(value, lambda _, tensor: torch.empty(0, dtype=tensor.dtype))
    buffer = io.BytesIO()
    try:
        torch.save(small, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def _to_host(tensor: Tensor) -> Tensor:
    own = tensor.detach().cpu()
    return own.requires_grad_() if tensor.requires_grad else own


def _on_host(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
