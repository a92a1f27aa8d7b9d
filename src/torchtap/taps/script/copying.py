"""A copy of a scripted or traced module whose graphs nobody has run, with the original's parameters and buffers.

TorchScript runs a copy of a graph that was ever called, so an edit of it would be ignored in silence.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from torchtap.names import WRAPPER_CLASSES, join_path
from torchtap.taps.graph.regions import without

__all__ = ["script_copy", "script_modules"]


def script_copy(module: Any) -> Any:
    """A copy by way of a file. Names of values in it do not depend on whether the original was loaded itself."""
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    copy = torch.jit.load(buffer)
    originals = script_modules(module)
    for path, instance in script_modules(copy).items():
        _share_tensors(originals[path], instance)
    return copy


def script_modules(module: Any) -> dict[str, Any]:
    """Path to the C++ module, each instance under the first of its names. Wrappers leave no trace in a path."""
    modules = dict(module.named_modules())
    wrapped = [
        join_path(path, "module") for path, each in modules.items() if each.original_name in WRAPPER_CLASSES
    ]
    return {without(path, wrapped): each._c for path, each in modules.items() if path not in wrapped}


def _share_tensors(original: Any, copy: Any) -> None:
    held: tuple[Any, ...] = (torch._C.ParameterDict, torch._C.BufferDict)
    for each in held:
        for name, tensor in each(original).items():
            copy.setattr(name, tensor)
