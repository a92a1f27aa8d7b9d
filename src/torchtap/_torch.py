"""What torchtap needs of torch and torch does not promise: private names, each with what happens where it is gone.

No other file asks torch for a private name; a test holds that. Three ways for a name to be gone:
- what everything stands on (autograd's pass, trees, `torch.func`) is asked for when this file is imported: a torch
  without it is refused whole;
- what one form stands on is asked for when that form is met: it is refused with a `FormError`, and the rest works;
- what only saves work or explains has an answer without it.

Importing this file imports nothing that ``import torch`` has not imported already: no compiler.
"""

from __future__ import annotations

import copy
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from torchtap.errors import FormError
from torchtap.torchscript import ScriptCore, ScriptMethod, ScriptType

__all__ = [
    "OPERATORS",
    "TORCH_VERSION",
    "AnyDropout",
    "DispatchMode",
    "FakeTensor",
    "FunctionalTensor",
    "RunningNorm",
    "archive_reader",
    "base_of",
    "below_autograd",
    "compiled_function",
    "compiler_was_used",
    "drop_empty_hooks",
    "foreach_norm",
    "gradient_bearer",
    "graph_task",
    "graphs_being_traced",
    "has_global_hooks",
    "has_lazy_bits",
    "has_step_hooks",
    "hear_gradient",
    "in_backward",
    "innermost_transform",
    "is_being_functionalized",
    "is_compiled_module",
    "is_traced_by_fx",
    "is_traced_by_script",
    "keep_in_order",
    "kept_by_inductor",
    "leave_to_python",
    "load_aoti_package",
    "load_program_archive",
    "mark_constant",
    "node_that_runs",
    "outside_of_transforms",
    "patch_script_compiler",
    "pytree",
    "saved_by",
    "script_string_type",
    "script_tensors",
    "script_tracer",
    "sequence_number",
    "set_grad_enabled",
    "shape_from",
    "skip_alone",
    "something_was_compiled",
    "step_without_hooks",
    "unpacked_size",
    "user_backend",
    "version_of",
    "without_transforms",
]


# The torch that runs, as a run says it.
TORCH_VERSION = str(torch.__version__)


def _needed(module: str, name: str, purpose: str) -> Any:
    """A private name that one form stands on."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FormError(
            f"this torch ({TORCH_VERSION}) has no {module}.{name}, which torchtap needs to {purpose}; "
            "everything else works: tap the eager model, or use a torch that docs/install.md lists"
        ) from error


# ---- Autograd. Without these the import fails: repetitions would be recorded as calls, changed values as unchanged.

# The number of the backward pass that runs in this thread, -1 if none does. It tells a checkpoint's repetition from
# a call of the model.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return True if autograd is at work in this thread: a forward that runs now is a checkpoint's repetition."""
    return graph_task() != -1


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 where nothing tells, so nothing proves it unchanged.

    Inference tensors keep no version.
    """
    return -1 if tensor.is_inference() else tensor._version


class _Bearer(threading.local):
    """A tensor of each thread's own that hooks are handed over by."""

    def __init__(self) -> None:
        self.tensor = torch.zeros((), requires_grad=True)


_bearer = _Bearer()


def hear_gradient(value: Tensor, hear: Callable[[Tensor | None], None]) -> None:
    """Have a function called with the gradient of a value that a node made, when it comes to that node.

    ``node.register_prehook`` and ``value.register_hook`` make a table and a handle each time. Here the table is handed
    over by a tensor that stands in for the value, a fifth of the time. Where torch has no such way, or the node makes
    several values, it is the longer one.
    """
    node = value.grad_fn
    position = value.output_nr
    if position or not hasattr(node, "_register_hook_dict"):
        node.register_prehook(lambda gradients: hear(gradients[position]))  # type: ignore[union-attr]
        return
    bearer = _bearer.tensor
    bearer._backward_hooks = {0: hear}
    try:
        node._register_hook_dict(bearer)  # type: ignore[union-attr]
    finally:
        bearer._backward_hooks = None


def drop_empty_hooks(value: Tensor) -> None:
    """Leave a tensor without a table of hooks if the table is empty, as it was before its first hook."""
    if not value._backward_hooks:
        value._backward_hooks = None


def gradient_bearer() -> Tensor | None:
    """A tensor that native code hands tables of hooks over by, as above; None where torch has no such way."""
    node = (torch.zeros((), requires_grad=True) * 1).grad_fn
    known = hasattr(node, "_register_hook_dict") and hasattr(Tensor, "_base")
    return torch.zeros((), requires_grad=True) if known else None


def saved_by(node: object, name: str) -> Any:
    """What a node of autograd's graph has kept for its backward under a name; None where it has no such thing."""
    return getattr(node, f"_saved_{name}", None)


def shape_from(node: Any) -> tuple[int, ...] | None:
    """The shape of the first value that a node of autograd's graph has made; None where torch does not tell."""
    made = getattr(node, "_input_metadata", None)
    return tuple(made[0].shape) if made else None


def node_that_runs() -> tuple[str, int] | None:
    """The name and the number of autograd's node that runs in this thread. Where torch cannot say, none does."""
    asked = getattr(torch._C, "_current_autograd_node", None)
    node = None if asked is None else asked()
    number = getattr(node, "_sequence_nr", None)
    return None if node is None or number is None else (node.name(), number())


def sequence_number() -> int:
    """The number that autograd's next node will have; -1 where torch does not tell, so that no node is known by it."""
    asked = getattr(torch.autograd, "_get_sequence_nr", None)
    return -1 if asked is None else asked()


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of. Where torch does not say, it is taken for none."""
    return getattr(tensor, "_base", None)


def below_autograd() -> AbstractContextManager[None]:
    """Calls in here go to the kernels below autograd, so that an op can call itself from its autograd kernel."""
    context: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return context


# ---- Wrappers of values. Without these the import fails: memory that is not there would be read.

_functorch: Any = torch._C._functorch
# The innermost torch.func transform that runs in this thread; None outside of all.
innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
# A context in which what is computed is no part of the transforms that run.
outside_of_transforms: Callable[[], AbstractContextManager[Any]] = temporarily_clear_interpreter_stack


def without_transforms(value: Tensor) -> Tensor | None:
    """The value one wrapper of a ``torch.func`` transform further in; None where there is no wrapper."""
    if not _functorch.is_functorch_wrapped_tensor(value):
        return None
    inside: Tensor = _functorch.get_unwrapped(value)
    return inside


# Whether a tensor is a functionalization's stand-in, which has no values.
is_being_functionalized: Callable[[Tensor], bool] = torch._is_functional_tensor


def has_lazy_bits(value: Tensor) -> bool:
    """Return True if a conjugation or a negation is noted and not done yet.

    ``is_conj`` and ``is_neg`` say the same, but let go of the interpreter's lock, and this is asked for each tensor
    that is written while the training runs.
    """
    keys = torch._C._dispatch_keys(value)
    return keys.has(torch._C.DispatchKey.Conjugate) or keys.has(torch._C.DispatchKey.Negative)


def sparse_bytes(value: Tensor) -> int:
    """How much memory a sparse tensor holds, also one that is not coalesced, whose parts have no public way to."""
    return int(value._values().nbytes) + int(value._indices().nbytes)


# ---- Modules and groups of tensors: there are slower or more careful ways. `AnyDropout` and `RunningNorm` are the
# bases of torch's dropouts and of its norms that keep running statistics.


def has_global_hooks() -> bool:
    """Return True if hooks are on all modules of the process. Where torch does not say, they may be."""
    asked = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return True if asked is None else bool(asked())


# What ``torch.set_grad_enabled`` calls, without an object around it.
set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def foreach_norm(values: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each tensor, by one call where torch has it."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(value, order, dtype=dtype) for value in values]
    norms: Sequence[Tensor] = together(values, order, dtype=dtype)
    return norms


# ---- Tracers.


# What ``torch.jit.trace`` has of this code so far; None where it does not run it, or torch cannot say.
script_tracer: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)


def is_traced_by_script() -> bool:
    """Return True if ``torch.jit.trace`` runs this code."""
    return script_tracer() is not None


def is_traced_by_fx() -> bool:
    """Return True if ``torch.fx.symbolic_trace`` runs this code. Where torch cannot say, it does not."""
    asked = getattr(sys.modules.get("torch.fx._symbolic_trace"), "is_fx_symbolic_tracing", None)
    return asked is not None and bool(asked())


def patch_script_compiler(around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Have TorchScript make script modules inside of ``around(module)``: it compiles every hook that it finds.

    Where the function is gone, a module with torchtap's hooks cannot be scripted.
    """
    compiler = torch.jit._recursive
    create = getattr(compiler, "create_script_module", None)
    if create is None:
        return

    def create_script_module(nn_module: object, *args: object, **kwargs: object) -> object:
        with around(nn_module):
            return create(nn_module, *args, **kwargs)

    compiler.create_script_module = create_script_module


# ---- Compiled models. Nothing here imports the compiler before a model asks for it.


def is_compiled_module(module: object) -> bool:
    """Whether this is what ``torch.compile(module)`` returned: there is none where the compiler was never imported."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and isinstance(module, getattr(loaded, "OptimizedModule", ()))


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


def kept_by_inductor(backend: Any) -> Any:
    """Inductor's backend, so that it keeps graphs with effects on disk as it does all others.

    Inductor does not know of ``with_effects`` that nothing but its arguments tells what it does; it does not for our
    ops, whose arguments are a tensor and a name. Other backends, and that of a torch without the setting, are as they
    were: the graph is compiled in each process.
    """
    if type(backend).__name__ != "_TorchCompileInductorWrapper" or not isinstance(backend.config, dict):
        return backend
    setting = "unsafe_marked_cacheable_functions"
    known = backend.config.get(setting, getattr(torch._inductor.config, setting, None))
    if known is None:
        return backend
    keeping = copy.copy(backend)
    keeping.config = {
        **backend.config,
        setting: {**known, "torch.ops.higher_order.with_effects": torch.__version__},
    }
    return keeping


def inside_compiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, of what it returned."""
    inner: nn.Module = module._orig_mod  # type: ignore[assignment]
    return inner


def compiled_in_place(module: nn.Module) -> Callable[..., object] | None:
    """What ``module.compile()`` made, if it was called."""
    return module._compiled_call_impl


def runs_compiled(module: nn.Module) -> bool:
    """Return True if a call of this module runs compiled code, by ``torch.compile(module)`` or ``module.compile()``."""
    return compiled_in_place(module) is not None or is_compiled_module(module)


def compiled_function(function: object) -> Callable[..., object] | None:
    """What ``torch.compile`` was called with, if this is the function that it returned."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def user_backend(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The backend that the user named, inside of what Dynamo wraps around it.

    By hand: torch's own function for this has one name in 2.9 and another in later ones.
    """
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def dynamic_setting(settings: Any) -> bool | None:
    """The ``dynamic=`` that a compilation was asked for; None, torch's own choice, where that is not kept."""
    return getattr(settings, "_dynamic", None)


def guard_options(settings: Any) -> dict[str, Any] | None:
    """The ``options=`` that give a further compilation the user's choice of guards, if there is one."""
    chosen = getattr(getattr(settings.callback, "hooks", None), "guard_filter_fn", None)
    return None if chosen is None else {"guard_filter_fn": chosen}


def skip_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo trace a function with what calls it, and never by itself."""
    skip = _needed("torch._dynamo.eval_frame", "skip_code", "record inside compiled models")
    skip(function.__code__)


def leave_to_python(function: Callable[..., object]) -> None:
    """Keep Dynamo from compiling this function and what it calls, where an op is called between two of its graphs.

    A torch without the words for that may compile it, which costs time and changes nothing.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def mark_constant(function: Callable[..., object]) -> None:
    """What ``torch.compiler.assume_constant_result`` does, without loading the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep_in_order(op: Any) -> None:
    """Tell compilers that an op without a result does something, and that calls of it keep their order."""
    home, purpose = "torch._higher_order_ops.effects", "record inside compiled, exported and scripted models"
    register = _needed(home, "_register_effectful_op", purpose)
    register(op, _needed(home, "_EffectType", purpose).ORDERED)


def something_was_compiled() -> bool:
    """Return True if Dynamo has looked at any frame; False where it cannot be told. It only words an explanation."""
    return bool(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", None))


def compiler_was_used() -> bool:
    """Return True if anything in this process was given to torch.compile. Optimizers load the compiler in any case.

    Where torch does not say, it was, if it is loaded.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[Any, Any] | None = getattr(frames, "cached_backends", None)
    if backends is None:
        return frames is not None
    return any(backend is not None for backend in backends.values())


# ---- Scripted models: the C++ module behind each, which Python's own has no public way to.


def script_core(module: Any) -> ScriptCore:
    """The C++ module of a scripted one."""
    core: ScriptCore = module._c
    return core


def script_methods(core: Any) -> dict[str, ScriptMethod]:
    """The compiled methods of a C++ module, by name."""
    return {name: core._get_method(name) for name in core._method_names()}


def add_script_text(core: Any, name: str, text: str) -> None:
    """Give a C++ module an attribute that holds a text."""
    core._register_attribute(name, script_string_type(), text)


def script_string_type() -> ScriptType:
    """TorchScript's type of text."""
    text: ScriptType = _needed("torch._C", "StringType", "record inside scripted models").get()
    return text


def script_tensors(core: ScriptCore) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a C++ module, by name."""
    for holder in ("ParameterDict", "BufferDict"):
        yield from _needed("torch._C", holder, "record inside scripted models")(core).items()


# ---- Files.

# What an exported program may call.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


def archive_reader(opened: IO[bytes]) -> Any:
    """A file as torch's own zip reader sees it: another reader could be shown other members."""
    return _needed("torch._C", "PyTorchFileReader", "look at a file before loading it")(opened)


def unpacked_size(archive: Any, names: Iterable[str], opened: IO[bytes]) -> int:
    """How many bytes the members of a file unpack to. Where torch's reader does not tell (2.9), the zip's list does."""
    if hasattr(archive, "get_record_size"):
        return sum(map(archive.get_record_size, names))
    with zipfile.ZipFile(opened) as members:
        return sum(member.file_size for member in members.infolist())


def load_program_archive(opened: IO[bytes]) -> Any:
    """An exported program's archive, of which nothing has run."""
    home = "torch.export.pt2_archive._package"
    return _needed(home, "load_pt2", "load exported programs without running code of theirs")(opened)


def load_aoti_package(file: str) -> Any:
    """An AOTInductor package. Runs the machine code in it."""
    return _needed("torch._inductor", "aoti_load_package", "load AOTInductor packages")(file)


def has_step_hooks(optimizer: object) -> bool:
    """Return True if an optimizer has step hooks of its own, or if this torch has another place for them."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, kind, True) for kind in kinds)


def step_without_hooks(kind: type) -> Callable[..., Any]:
    """Return the step of an optimizer's class without the function around it that calls all step hooks."""
    step = kind.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
