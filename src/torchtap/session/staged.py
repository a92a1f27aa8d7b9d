"""Several parts of one model, such as the pipeline stages of a rank, as one tree with the whole model's names.

The parts keep the names that their modules have in the whole: containers of the same name are one, everything else has
to be in one part alone. The tree only holds the modules; it is never called, and nothing of the parts is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchtap.errors import PlanError

__all__ = ["joined"]


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """A module that holds what the parts hold, under the names that it has there."""
    whole = nn.Module()
    for part in parts:
        _add(whole, part, "")
    return whole


def _add(whole: nn.Module, part: nn.Module, path: str) -> None:
    for name, parameter in part._parameters.items():
        whole._parameters.setdefault(name, parameter)
    for name, buffer in part._buffers.items():
        whole._buffers.setdefault(name, buffer)
    for name, child in part._modules.items():
        known = whole._modules.get(name)
        if child is None or known is child:
            continue
        here = f"{path}.{name}" if path else name
        if known is None:
            whole._modules[name] = _held(child)
            if whole._modules[name] is not child:
                _add(whole._modules[name], child, here)  # type: ignore[arg-type]
        elif _is_container(child):
            _add(known, child, here)
        else:
            raise PlanError(
                f"{here!r} is in two of the parts that are watched together, and is two modules: give parts of one "
                "model, whose modules have the names of the whole, or several models by name"
            )


def _held(child: nn.Module) -> nn.Module:
    """The module itself; of a container, which other parts may have more of, an empty one in its place."""
    return nn.Module() if _is_container(child) else child


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
