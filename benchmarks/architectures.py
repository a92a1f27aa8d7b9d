"""Every architecture in every form, site by site, beside hand-written hooks on the eager model.

``python -m benchmarks.architectures`` prints the table of docs/forms.md. For each eager site:
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

__all__ = ["FAST", "FORMS", "NAMELESS", "Count", "count", "main", "reference", "table"]

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
# What the tests run.
FAST = ("resnet, by hand", "gpt, LoRA", "gpt, no_grad", "experts", "shared", "lstm", "llama", "t5")


def count(name: str, form: str, like: bool = False, compare: bool = False) -> Count:
    """One architecture in one form."""
    model, args, kwargs = build(name)
    expected = reference(model, args, kwargs)
    made = FORMS[form](model, (args, kwargs))
    more: dict[str, Any] = {"like": model, "inputs": kwargs or args} if like else {}
    with tt.capture(made, "*:output", **more) as seen:
        returned = made(*args, **kwargs)
    if not _faithful(expected, returned, form in CLOSE):
        return Count(sites=len(expected), verdict="the form computes something else")
    result = judge(expected, dict(seen.items()), close=form in CLOSE)
    reasons = {missing.site for missing in seen.coverage()}
    for line in list(result.details):
        kind, _, site = line.partition(" ")
        if kind == "missing" and not _is_explained(site, reasons):
            result.unexplained += 1
            result.details.append(f"unexplained {site}")
    if compare:
        comparison = tt.compare(model, made, inputs=kwargs or args)
        result.verdict = "same" if comparison.first is None else comparison.verdict
    return result


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


def table(rows: list[dict[str, Any]]) -> str:
    """The counts of every form, as docs/forms.md has them."""
    lines = [
        "| form | architectures | sites | clean | wrong | renamed | missing | not explained | compared: same |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    forms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        forms.setdefault(row["form"], []).append(row)
    for form, counted in forms.items():
        held = [
            row
            for row in counted
            if "problem" not in row and row["verdict"] != "the form computes something else"
        ]
        sums = {
            key: sum(row[key] for row in held) for key in ("sites", "clean", "wrong", "renamed", "missing")
        }
        share = 100 * sums["clean"] / max(1, sums["sites"])
        compared = [row for row in held if row["verdict"]]
        same = sum(row["verdict"] == "same" for row in compared)
        lines.append(
            f"| {form} | {len(held)} | {sums['sites']} | {sums['clean']} ({share:.1f} %) | {sums['wrong']} | "
            f"{sums['renamed']} | {sums['missing']} | {sum(row['unexplained'] for row in held)} | "
            f"{f'{same} of {len(compared)}' if compared else '–'} |"
        )
    return "\n".join(lines)


def _row(name: str, form: str, like: bool, compare: bool) -> dict[str, Any]:
    label = f"{form}, like the model" if like else form
    try:
        return {"form": label, "name": name, **dataclasses.asdict(count(name, form, like, compare))}
    except Exception as error:  # the form cannot be made of this architecture: torch's own message says why
        return {"form": label, "name": name, "problem": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch._dynamo.reset()


def main(arguments: list[str] | None = None) -> None:
    """Count, print a line for each pair and the table, and keep everything as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--compare", action="store_true", help="also tt.compare(model, form)")
    parser.add_argument("--details", type=int, default=0, help="lines to print for each pair")
    parser.add_argument("--out", type=Path, default=Path("architectures.json"))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = []
    for form in options.forms:
        for like in (False, True) if form in NAMELESS else (False,):
            for name in options.names:
                if form in SLOW and name not in FEW:
                    continue
                began = time.perf_counter()
                row = _row(name, form, like, options.compare and (like or form not in NAMELESS))
                rows.append(row)
                told = {key: value for key, value in row.items() if key not in ("form", "name", "details")}
                print(f"{row['form']:32} {name:26} {told} {time.perf_counter() - began:.1f}s", flush=True)
                for line in row.get("details", ())[: options.details]:
                    print("      ", line)
                options.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
