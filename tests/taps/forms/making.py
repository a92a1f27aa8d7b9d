"""Every form, made from an eager model: what to give to ``capture`` and what to call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.package import PackageExporter, PackageImporter

import torchtap as tt

PASSED = ("*:input", "*:output", "*:grad_input", "*:grad_output")


def saved_script(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def saved_program(program: Any) -> Any:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def saved_model(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def packaged(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.intern("tests.**")
        exporter.extern(["torch.**", "torch", "typing"])
        exporter.save_pickle("model", "model.pkl", model)
    buffer.seek(0)
    return PackageImporter(buffer).load_pickle("model", "model.pkl")


def transformed(model: nn.Module, x: Tensor) -> fx.GraphModule:
    """A traced graph after a transformation: every sine becomes a function of our own, dead code is gone."""
    graph_module = fx.symbolic_trace(model)
    for node in graph_module.graph.nodes:
        if node.target is torch.sin:
            with graph_module.graph.inserting_after(node):
                renamed = graph_module.graph.call_function(_sine, node.args)
                renamed.meta = dict(node.meta)
                node.replace_all_uses_with(renamed)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _sine(x: Tensor) -> Tensor:
    return torch.sin(x)


def _instrumented(model: nn.Module) -> nn.Module:
    return tt.instrument(model, *PASSED)  # type: ignore[no-any-return]


FORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "eager": lambda model, x: model,
    "compile, backend eager": lambda model, x: torch.compile(model, backend="eager", fullgraph=True),
    "compile, backend aot_eager": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compile, dynamic": lambda model, x: torch.compile(model, backend="aot_eager", dynamic=True),
    "compile in place": lambda model, x: (model.compile(backend="aot_eager"), model)[1],
    "script": lambda model, x: torch.jit.script(model),
    "script, only loaded": lambda model, x: saved_script(torch.jit.script(model)),
    "script of an instrumented model, loaded": lambda model, x: saved_script(
        torch.jit.script(_instrumented(model))
    ),
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "trace of an instrumented model, loaded": lambda model, x: saved_script(
        torch.jit.trace(_instrumented(model), x, check_trace=False)
    ),
    "freeze": lambda model, x: torch.jit.freeze(torch.jit.script(_instrumented(model).eval())),
    "FX": lambda model, x: fx.symbolic_trace(model),
    "FX, transformed": transformed,
    "FX of an instrumented model": lambda model, x: fx.symbolic_trace(_instrumented(model)),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "export, only loaded": lambda model, x: saved_program(torch.export.export(model, (x,))).module(),
    "export of an instrumented model, loaded": lambda model, x: saved_program(
        torch.export.export(_instrumented(model), (x,))
    ).module(),
    "export, decomposed": lambda model, x: (
        torch.export.export(_instrumented(model), (x,)).run_decompositions().module()
    ),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(_instrumented(model))),
    "deepcopy": lambda model, x: copy.deepcopy(_instrumented(model)),
    "torch.save": lambda model, x: saved_model(_instrumented(model)),
    "torch.package": lambda model, x: packaged(_instrumented(model)),
    "extra outputs, traced": lambda model, x: _extra(model, x, torch.jit.trace),
    "extra outputs, exported": lambda model, x: _extra(
        model, x, lambda module, args: torch.export.export(module, args).module()
    ),
}


def _extra(model: nn.Module, x: Tensor, compiler: Callable[[nn.Module, Any], Any]) -> Any:
    extra = tt.extra_outputs(model, "*:input", "*:output", args=(x,))
    return extra.wrap(compiler(extra.module, (x,)))
