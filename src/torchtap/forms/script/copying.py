"""A copy of a scripted or traced module whose graphs nobody has run, with the original's parameters and buffers.

TorchScript runs a copy of a graph that was ever called, so an edit of it would be ignored in silence.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from torchtap._torch import script_core, script_methods, script_tensors
from torchtap.errors import FormError
from torchtap.forms.graph.regions import without
from torchtap.plan.names import WRAPPER_CLASSES
from torchtap.spi import ModulePath
from torchtap.torchscript import ScriptCore, ScriptNode

__all__ = ["script_copy", "script_modules"]


def script_copy(module: object) -> nn.Module:
    """A copy by way of a file. Names of values in it do not depend on whether the original was loaded itself."""
    buffer = io.BytesIO()
    try:
        torch.jit.save(module, buffer)
    except RuntimeError as error:
        called = sorted({node.pyname() for node in _python_calls(module)})
        if not called:
            raise
        raise FormError(
            f"this trace calls Python ({', '.join(called)}), which TorchScript cannot copy or save, so no taps can "
            "be put into it; tap the eager model, or export it with torch.export"
        ) from error
    buffer.seek(0)
    copy: nn.Module = torch.jit.load(buffer)
    originals = script_modules(module)
    for path, instance in script_modules(copy).items():
        _share_tensors(originals[path], instance)
    return copy


def _python_calls(module: object) -> list[ScriptNode]:
    methods = [
        method for instance in script_modules(module).values() for method in script_methods(instance).values()
    ]
    return [node for method in methods for node in method.graph.findAllNodes("prim::PythonOp")]


def script_modules(module: Any) -> dict[str, ScriptCore]:
    """Path to the C++ module, each instance under the first of its names. Wrappers leave no trace in a path."""
    modules = dict(module.named_modules())
    wrapped = [
        (ModulePath(path) / "module")
        for path, each in modules.items()
        if each.original_name in WRAPPER_CLASSES
    ]
    return {
        without(path, wrapped): script_core(each) for path, each in modules.items() if path not in wrapped
    }


def _share_tensors(original: ScriptCore, copy: ScriptCore) -> None:
    for name, tensor in script_tensors(original):
        copy.setattr(name, tensor)
