"""Module paths of a graph that may be names of one module.

``model.b = model.a`` gives one module two names; eager counts its calls under the first. ``model.b.weight =
model.a.weight`` makes two modules that share their parameters. An exported graph looks the same for both, so a
name is certain only up to the first call of a second path.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from torchtap.spi import ModulePath, Name

__all__ = ["DoubtfulNames", "Lookalikes", "lookalike_paths"]


def lookalike_paths(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of paths whose modules hold the same parameters under the same names, and nothing else."""
    found: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = tuple(
            (name, _memory(tensor)) for name, tensor in module.named_parameters(remove_duplicate=False)
        )
        if held and path:
            found.setdefault(held, []).append(path)
    return [tuple(paths) for paths in found.values() if len(paths) > 1 and not _nested(paths)]


def _memory(tensor: Tensor) -> object:
    """What two parameters that were one have in common; loading a file makes two objects of one memory."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _nested(paths: list[str]) -> bool:
    """Return True if the paths are a module and what it wraps, which hold the same parameters under other names."""
    return any(ModulePath(one).is_inside(other) for one in paths for other in paths)


@final
class Lookalikes:
    """Asked for each module call, in the order of the calls."""

    def __init__(self, groups: list[tuple[str, ...]]) -> None:
        self._groups = groups
        self._doubtful = [False] * len(groups)

    def begin(self) -> None:
        """The calls are counted anew."""
        self._doubtful = [False] * len(self._groups)

    def is_certain(self, path: str) -> bool:
        """Return True if the next call at this path has the name that eager gives it."""
        certain = True
        for number, group in enumerate(self._groups):
            if any(path == each or ModulePath(path).is_inside(each) for each in group):
                first = group[0]
                self._doubtful[number] |= not (path == first or ModulePath(path).is_inside(first))
                certain &= not self._doubtful[number]
        return certain


@final
class DoubtfulNames:
    """Numbers the leaves of calls whose names are not certain: a receiver's `rename`."""

    def __init__(self, groups: list[tuple[str, ...]]) -> None:
        self._lookalikes = Lookalikes(groups)
        self._passes = -1

    def __call__(self, passes: int, path: str, leaf: str) -> str:
        if self._passes != passes:
            self._passes = passes
            self._lookalikes.begin()
        if self._lookalikes.is_certain(path):
            return leaf
        return f"{Name.unplaced(0, doubtful=True)}{'.' if leaf else ''}{leaf}"
