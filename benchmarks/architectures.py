"""Every architecture in every form, site by site, beside hand-written hooks on the eager model.

``python -m benchmarks.architectures`` writes the table of docs/forms.md. For each eager site:
- clean: the form has this name, and the value is the eager one;
- wrong: the form has this name on another value;
- renamed: the form has the value, under another name;
- missing: the form does not have the value; ``unexplained`` are those of which coverage says nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import torchtap as tt
from benchmarks.zoo import ARCHITECTURES, build

__all__ = ["FORMS", "Count", "count", "main", "reference"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class Count:
    """How the sites of one architecture fared in one form."""

    sites: int = 0
    clean: int = 0
    wrong: int = 0
    renamed: int = 0
    missing: int = 0
    unexplained: int = 0
    verdict: str = ""
    details: list[str] = dataclasses.field(default_factory=list)


def reference(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every output by name, from forward hooks that know nothing of torchtap."""
    found: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    handles = []

    def hook(path: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            call = calls.get(path, 0)
            calls[path] = call + 1
            for leaf, tensor in _leaves(output):
                name = f"{path}:output" + (f".{leaf}" if leaf else "") + (f"#{call}" if call else "")
                found[name] = tensor.detach().clone()

        return keep

    inner = model.module if isinstance(model, nn.DataParallel) else model
    for path, module in inner.named_modules():
        handles.append(module.register_forward_hook(hook(path)))
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(tree, Mapping):
        parts = list(tree.items())
    elif hasattr(tree, "_fields"):
        parts = list(zip(tree._fields, tree, strict=True))
    elif isinstance(tree, (list, tuple)):
        parts = list(enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = [(each.name, getattr(tree, each.name)) for each in dataclasses.fields(tree)]
    elif tree is not None and type(tree).__module__.startswith("transformers."):
        parts = [(name, value) for name, value in vars(tree).items()]
    for key, value in parts:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _exported(model: nn.Module, given: Arguments) -> Any:
    return torch.export.export(model, *given).module()


def _loaded_export(model: nn.Module, given: Arguments) -> Any:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, *given), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def _traced(model: nn.Module, given: Arguments) -> Any:
    args, kwargs = given
    if kwargs:
        return torch.jit.trace(model, example_kwarg_inputs=kwargs, check_trace=False, strict=False)
    return torch.jit.trace(model, args, check_trace=False, strict=False)


def _reloaded(script: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _packaged(model: nn.Module, given: Arguments) -> Any:
    program = torch.export.export(tt.instrument(model, "*:output"), *given)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return tt.load(path)


FORMS: dict[str, Callable[[nn.Module, Arguments], Any]] = {
    "eager": lambda model, given: model,
    "compile, aot_eager": lambda model, given: torch.compile(model, backend="aot_eager"),
    "compile, inductor": lambda model, given: torch.compile(model),
    "export": _exported,
    "export, loaded": _loaded_export,
    "trace": _traced,
    "trace, loaded": lambda model, given: _reloaded(_traced(model, given)),
    "script": lambda model, given: torch.jit.script(model),
    "FX": lambda model, given: fx.symbolic_trace(model),
    "export, instrumented": lambda model, given: _exported(tt.instrument(model, "*:output"), given),
    "trace, instrumented": lambda model, given: _traced(tt.instrument(model, "*:output"), given),
    "AOTInductor, instrumented": _packaged,
}
# Forms that compute in another order: equal within a tolerance.
CLOSE = {"compile, inductor", "AOTInductor, instrumented"}
# Forms that keep no names of their own: `like=` gives them those of the model at hand.
NAMELESS = {"export", "export, loaded", "trace", "trace, loaded", "FX"}


def count(name: str, form: str, like: bool = False, compare: bool = False) -> Count:
    """One architecture in one form."""
    model, args, kwargs = build(name)
    expected = reference(model, args, kwargs)
    made = FORMS[form](model, (args, kwargs))
    more: dict[str, Any] = {"like": model, "inputs": kwargs or args} if like else {}
    with tt.capture(made, "*:output", **more) as seen:
        made(*args, **kwargs)
    result = judge(expected, dict(seen.items()), close=form in CLOSE)
    reasons = {missing.site for missing in seen.coverage()}
    for line in list(result.details):
        kind, _, site = line.partition(" ")
        if kind == "missing" and not _is_explained(site, reasons):
            result.unexplained += 1
            result.details.append(f"unexplained {site}")
    if compare:
        result.verdict = tt.compare(model, made, inputs=kwargs or args).verdict
    return result


def _is_explained(site: str, reasons: set[str]) -> bool:
    bare = site.partition("#")[0]
    path, _, kind = bare.rpartition(":")
    return site in reasons or bare in reasons or f"{path}:{kind.partition('.')[0]}" in reasons


def judge(expected: dict[str, Tensor], found: dict[str, Tensor], close: bool = False) -> Count:
    """The eager sites beside what a form gave."""
    result = Count(sites=len(expected))
    for site, value in expected.items():
        if site in found:
            what = "clean" if _same(found[site], value, close) else "wrong"
        elif any(_same(other, value, close) for other in found.values()):
            what = "renamed"
        else:
            what = "missing"
        setattr(result, what, getattr(result, what) + 1)
        if what != "clean":
            result.details.append(f"{what} {site}")
    return result


def _same(one: Tensor, other: Tensor, close: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    if close and one.is_floating_point():
        return torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def main(arguments: list[str] | None = None) -> None:
    """Count, print a line for each pair, and write everything as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--like", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--details", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = []
    for form in options.forms:
        for name in options.names:
            began = time.perf_counter()
            try:
                result = count(name, form, options.like and form in NAMELESS, options.compare)
            except Exception as error:
                print(
                    f"{form:24} {name:26} does not: {type(error).__name__}: {str(error).splitlines()[:1]}",
                    flush=True,
                )
                rows.append({"form": form, "name": name, "problem": f"{type(error).__name__}: {error}"[:300]})
                continue
            finally:
                torch._dynamo.reset()
            print(
                f"{form:24} {name:26} {result.sites:4} clean {result.clean:4} wrong {result.wrong:3} renamed "
                f"{result.renamed:3} missing {result.missing:3} unexplained {result.unexplained:3} "
                f"{result.verdict[:40]} {time.perf_counter() - began:.1f}s",
                flush=True,
            )
            for line in result.details[: options.details]:
                print("      ", line)
            rows.append({"form": form, "name": name, **dataclasses.asdict(result)})
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
