"""Values as further outputs of the graph, for compilers that take no foreign op.

`extra_outputs` gives a module that returns everything flat: the model's own outputs, then the chosen values.
What a compiler makes of it, `wrap` turns back: the caller sees the model's own signature and result, the session
gets the values. It guarantees:
- a value is copied where it appears, so that a later in-place operation does not reach it;
- the names are those of the eager model, since it is the eager model that ran.

Gradients are not outputs of a forward graph; asking for them is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from torchtap import Plan, Tap, make_plan
from torchtap._torch import pytree
from torchtap.errors import FormError, MissingExtraError, PlanError
from torchtap.forms.copy_model import copy_with_shared_tensors
from torchtap.forms.instrument.program_gate import check_tree
from torchtap.forms.op.emitting import EmittingModel
from torchtap.hooks.leaves import Args, Function, Kwargs
from torchtap.plan.sites import Selectable
from torchtap.sanitize import parse_json
from torchtap.spi import Call, Name, Stop, Visiting, input_leaves, leaves

__all__ = ["ExtraOutputs", "extra_outputs", "load_onnx"]

_METADATA = "torchtap"


class _Flat(nn.Module):
    """Runs a model and returns the tensors of its result and the values of some sites, in one tuple."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = copy_with_shared_tensors(model)
        self._found: list[tuple[str, Tensor]] = []
        self.spec: pytree.TreeSpec | None = None
        self.constants: dict[int, object] = {}  # leaves of the result that are no tensors, by position
        self.names: tuple[str, ...] = ()
        stops = [
            Stop(
                port.site.path,
                self.model.get_submodule(port.site.path),
                inputs=port.site.kind == "input",
                outputs=port.site.kind == "output",
            )
            for port in plan.ports
        ]
        self._visiting = Visiting(self.model, self, stops)
        self._visiting.begin()

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """A module is given these values."""
        self._keep(call, "input", input_leaves(call.input_names, args, kwargs))

    def after(self, call: Call, output: object) -> None:
        """A module returned this."""
        self._keep(call, "output", leaves(output))

    def _keep(self, call: Call, kind: str, found: Iterable[tuple[str, Tensor]]) -> None:
        for leaf, tensor in found:
            # A copy, so that a later in-place operation does not reach it.
            self._found.append((str(Name(call.path, kind, leaf, call.number)), tensor.detach().clone()))

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        self._found = []
        self._visiting.start_pass()
        flat, self.spec = pytree.tree_flatten(self.model(*args, **kwargs))
        self.constants = {n: leaf for n, leaf in enumerate(flat) if not isinstance(leaf, Tensor)}
        found, self._found = self._found, []
        self.names = tuple(name for name, _ in found)
        return (*(leaf for leaf in flat if isinstance(leaf, Tensor)), *(tensor for _, tensor in found))


@final
class ExtraOutputs:
    """Made by `extra_outputs`. ``module`` is for the compiler, ``sites`` are the further outputs in order."""

    def __init__(self, module: _Flat) -> None:
        self.module = module
        self.sites = module.names
        self._spec, self._constants = module.spec, dict(module.constants)

    def wrap(self, call: Function) -> EmittingModel:
        """What the compiler made of ``module``, with the model's own signature; give it to `capture` or `watch`."""
        return _wrapped(call, self.sites, self._spec, self._constants)

    def to_onnx(self, path: str | Path, args: Args, **options: Any) -> EmittingModel:
        """Write an ONNX file whose further outputs are called by their sites, and load it in onnxruntime.

        ``options`` go to ``torch.onnx.export``. `torchtap.load` reads the file in any other process.
        """
        onnx = _imported("onnx")
        _imported("onnxscript")
        count = (self._spec.num_leaves if self._spec is not None else 0) - len(self._constants)
        names = [*(f"output_{n}" for n in range(count)), *self.sites]
        options.setdefault("dynamo", True)
        options.setdefault("verbose", False)
        torch.onnx.export(self.module, args, str(path), output_names=names, **options)
        written = onnx.load(str(path), load_external_data=False)
        described = {
            "sites": list(self.sites),
            "spec": pytree.treespec_dumps(self._spec) if self._spec is not None else None,
            "constants": {str(position): value for position, value in self._constants.items()},
        }
        onnx.helper.set_model_props(written, {_METADATA: json.dumps(described)})
        onnx.save(written, str(path))
        return load_onnx(path)


def extra_outputs(
    model: nn.Module,
    *taps: Tap | Selectable,
    args: Args = (),
    kwargs: Mapping[str, Any] | None = None,
) -> ExtraOutputs:
    """Add the values of some sites to a model's outputs. ``args`` and ``kwargs`` are inputs to run it once with."""
    plan = make_plan(model, taps or ("*:output",))
    for port in plan.ports:
        if port.site.kind not in ("input", "output"):
            raise PlanError(
                f"{port.site.name} cannot be an extra output: only what goes in and out of a forward can; "
                "gradients need a form that autograd runs through, parameters are read from the model"
            )
    flat = _Flat(model, plan)
    with torch.no_grad():
        flat(*args, **(kwargs or {}))
    return ExtraOutputs(flat)


def _wrapped(
    call: Function,
    sites: tuple[str, ...],
    spec: pytree.TreeSpec | None,
    constants: Mapping[int, object],
    about: str = "",
) -> EmittingModel:
    def run(bring: Callable[[Any], None], *args: Any, **kwargs: Any) -> Any:
        flat = [leaf for leaf in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, Tensor)]
        own = flat[: len(flat) - len(sites)]
        bring(list(zip(sites, flat[len(own) :], strict=True)))
        if spec is None:
            return tuple(own) if len(own) != 1 else own[0]
        tensors = iter(own)
        filled = [constants[n] if n in constants else next(tensors) for n in range(spec.num_leaves)]
        return pytree.tree_unflatten(filled, spec)

    return EmittingModel(run, sites, brings=True, about=about)


def load_onnx(path: str | Path) -> EmittingModel:
    """An ONNX file with extra outputs, run by onnxruntime. Inputs and outputs are torch tensors."""
    session = _session(path)
    sites, spec, constants = _described(
        path, session.get_modelmeta().custom_metadata_map.get(_METADATA, "{}")
    )
    names = [each.name for each in session.get_inputs()]

    def call(*args: Any, **kwargs: Any) -> list[Tensor]:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        feed = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, given, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return _wrapped(call, sites, spec, constants, about=str(path))


def _session(path: str | Path) -> Any:
    """The file in onnxruntime, which refuses weights outside of the file's own folder."""
    runtime = _imported("onnxruntime")
    try:
        return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise FormError(f"{str(path)!r} is no ONNX file that onnxruntime can open: {error}") from error


def _described(path: str | Path, text: str) -> tuple[tuple[str, ...], pytree.TreeSpec | None, dict[int, Any]]:
    """What the file says of its extra outputs: their sites, how to put the model's own together, and what is constant
    in them."""
    try:
        noted = parse_json(text)
        spec = noted.get("spec")
        if spec:
            check_tree(spec)  # torch imports the classes that a tree names
        sites = tuple(noted.get("sites", ()))
        if not all(isinstance(site, str) for site in sites):
            raise TypeError("a site is not a text")
        constants = {int(position): value for position, value in noted.get("constants", {}).items()}
        return sites, pytree.treespec_loads(spec) if spec else None, constants
    except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError, RecursionError) as error:
        raise FormError(f"{str(path)!r} has a damaged note of its extra outputs: {error}") from error


def _imported(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} is needed for ONNX files: pip install 'torchtap[onnx]'", extra="onnx"
        ) from error
