"""One architecture in one form, site by site, beside hand-written hooks on the eager model.

For each eager site:
- clean: the form has this name, and the value is the eager one;
- wrong: the form has this name on another value;
- renamed: the form has the value, under another name;
- missing: the form does not have the value; ``unexplained`` are those of which coverage says nothing.

`every_form` runs them all and prints the table of docs/forms.md.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

import torchtap as tt
from benchmarks.zoo import build

__all__ = ["FEW", "FORMS", "NAMELESS", "OTHER", "SLOW", "Count", "count", "judge", "reference"]

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
        return tt.load(path, unsafe=True)


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
# Forms that do not tell every name: they are counted once more with `like=` the model at hand.
NAMELESS = {"export", "export, loaded", "trace", "trace, loaded", "FX"}
# Forms that take long to make are made of these.
SLOW = CLOSE
FEW = ("mlp", "vgg", "unet", "gru", "gpt", "experts", "siamese", "rms norm", "bert", "llama")


OTHER = "the form computes something else"  # the verdict on a form that torch made unfaithfully


def count(name: str, form: str, compare: bool = True) -> dict[str, Count]:
    """One architecture in one form, by how it was asked: as it is and, if it does not tell names, like the model."""
    model, args, kwargs = build(name)
    expected = reference(model, args, kwargs)
    made = FORMS[form](model, (args, kwargs))
    given = kwargs or args
    counts: dict[str, Count] = {}
    hints: dict[str, dict[str, Any]] = {form: {}}
    if form in NAMELESS:
        hints[f"{form}, like the model"] = {"like": model, "inputs": given}
    for label, hint in hints.items():
        with tt.capture(made, "*:output", **hint) as seen:
            returned = made(*args, **kwargs)
        # Some compiled models are right to the last bit but one.
        close = form in CLOSE or ("compile" in form and not _faithful(expected, returned, close=False))
        if not _faithful(expected, returned, close):
            return {label: Count(sites=len(expected), verdict=OTHER) for label in hints}
        counts[label] = judge(expected, dict(seen.items()), close=close)
        _explain(counts[label], {missing.site for missing in seen.coverage()})
    if compare:
        comparison = tt.compare(model, made, inputs=given)
        last = counts[list(hints)[-1]]
        last.verdict = comparison.outcome
        last.details += [] if comparison.outcome == "same" else [f"compared {comparison.verdict}"]
    return counts


def _explain(result: Count, reasons: set[str]) -> None:
    """Count the missing sites of which coverage says nothing."""
    for line in list(result.details):
        kind, _, site = line.partition(" ")
        if kind == "missing" and not _is_explained(site, reasons):
            result.unexplained += 1
            result.details.append(f"unexplained {site}")


def _faithful(expected: dict[str, Tensor], returned: Any, close: bool) -> bool:
    """Whether a form returns what the model returns. Some tracers drop an autocast block in silence."""
    own = [value for site, value in expected.items() if site.startswith(":output")]
    found = [value for _, value in _leaves(returned)]
    return len(own) == len(found) and all(_same(a, b, close) for a, b in zip(own, found, strict=True))


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
