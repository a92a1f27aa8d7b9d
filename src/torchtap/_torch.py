"""What torchtap needs of torch and torch does not promise: private names, each with what happens where it is gone.

No other file should ask torch for a private name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "graph_task",
    "graphs_being_traced",
    "in_backward",
    "is_traced_by_script",
    "kept_by_inductor",
    "version_of",
]

# The number of the backward pass that runs in this thread, -1 if none does. It tells a checkpoint's repetition from
# a call of the model. Without it the import fails: every repetition would be recorded as a call.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is at work in this thread: a forward that runs now is a checkpoint's repetition."""
    return graph_task() != -1


def graphs_being_traced() -> list[str]:
    """The names of the operators whose inner graphs Dynamo is tracing in this thread, the innermost first.

    Where torch cannot say, there are none.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    found: list[str] = []
    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        while tracer.parent is not None:
            found.append(str(getattr(tracer.source_target, "__name__", tracer.source_target)))
            tracer = tracer.parent
    except AttributeError:
        return []
    return found


def is_traced_by_script() -> bool:
    """Whether ``torch.jit.trace`` runs this code. Where torch cannot say, it does not."""
    asked = getattr(torch._C, "_get_tracing_state", None)
    return asked is not None and asked() is not None


def patch_script_compiler(around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Have TorchScript make script modules inside of ``around(module)``: it compiles every hook that it finds.

    Where the function is gone, a module with hooks of ours cannot be scripted.
    """
    compiler = torch.jit._recursive
    create = getattr(compiler, "create_script_module", None)
    if create is None:
        return

    def create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        with around(nn_module):
            return create(nn_module, *args, **kwargs)

    compiler.create_script_module = create_script_module


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where nothing tells, so nothing proves it unchanged.

    Inference tensors keep no version.
    """
    return -1 if tensor.is_inference() else tensor._version


def kept_by_inductor(backend: Any) -> dict[str, Any]:
    """What to call Inductor's backend with, so that it keeps graphs with effects on disk as it does all others.

    Inductor does not know of ``with_effects`` that nothing but its arguments tells what it does; it does not for our
    ops, whose arguments are a tensor and a name. Other backends, and a torch that does not take the setting, get
    nothing: the graph is compiled in each process.
    """
    if type(backend).__name__ != "_TorchCompileInductorWrapper":
        return {}
    if "config_patches" not in inspect.signature(backend).parameters:
        return {}
    known = getattr(torch._inductor.config, "unsafe_marked_cacheable_functions", None)
    if known is None:
        return {}
    marked = {**known, "torch.ops.higher_order.with_effects": torch.__version__}
    return {"config_patches": {"unsafe_marked_cacheable_functions": marked}}
