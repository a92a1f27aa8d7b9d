"""Where the code is that made the first difference: the file and line of a module's forward."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace

import torch
from torch import nn

from torchtap.comparison.judge.result import Comparison
from torchtap.comparison.judge.words import in_target
from torchtap.plan.names import parent_path
from torchtap.plan.sites import places, unwrap

__all__ = ["located", "source_of"]


def located(result: Comparison, target: object) -> Comparison:
    """The same result, its first divergence with the source of the target's module where that is known."""
    if result.first is None or result.first.source or not isinstance(target, nn.Module):
        return result
    if isinstance(target, torch.jit.ScriptModule):
        return result  # its classes are TorchScript's own
    source = source_of(unwrap(target), in_target(result.first, result.rows))
    if not source:
        return result
    verdict = f"{result.verdict} Its code is {source}."
    return replace(result, first=replace(result.first, source=source), verdict=verdict)


def source_of(model: nn.Module, path: str) -> str:
    """``file.py:12 (Block.forward)`` of the module at ``path``; of the one around it where torch wrote it."""
    modules = {other: place.module for place in places(model) for other in (place.path, *place.other_paths)}
    while True:
        module = modules.get(path)
        if module is not None and not type(module).__module__.startswith("torch."):
            return _lines_of(module)
        if not path:
            return "" if module is None else _lines_of(module)
        path = parent_path(path)


def _lines_of(module: nn.Module) -> str:
    try:
        forward = inspect.unwrap(type(module).forward)
        file, line = inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
        return f"{file}:{line} ({forward.__qualname__})" if file and os.path.exists(file) else ""
    except (OSError, TypeError):  # written in a prompt, generated, or in C
        return ""
