"""One architecture in one form, site by site, beside hand-written hooks on the eager model.

For each eager site:
- clean: the form has this name, and the value is the eager one;
- wrong: the form has this name on another value;
- renamed: the form has the value, under another name;
- missing: the form does not have the value.

A site whose value is not under its module's own name has to be explained by the coverage; ``unexplained`` are those of
which it says nothing, or something that a run of the eager model shows to be untrue (`benchmarks.explained`). A site of
a module that the model does not have, or of a value that the module does not return, counts as wrong.

`every_form` runs them all and prints the table of docs/forms.md.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from tests.corpus.zoo import build
from torch import Tensor, fx, nn

import torchtap as tt
from benchmarks.explained import Truth, is_explained
from benchmarks.leaves import leaves_of
from torchtap.plan.names import Name, is_unplaced, read_name

__all__ = [
    "FEW",
    "FORMS",
    "NAMELESS",
    "OTHER",
    "SLOW",
    "Count",
    "count",
    "is_at_home",
    "judge",
    "other_names",
    "reference",
]

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

    def others(self) -> Iterator[tuple[str, str]]:
        """What is renamed or missing, each with its site."""
        for line in self.details:
            what, _, site = line.partition(" ")
            if what in ("renamed", "missing"):
                yield what, site


def reference(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every output by name, from forward hooks that know nothing of torchtap."""
    found: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    handles = []

    def hook(path: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            call = calls.get(path, 0)
            calls[path] = call + 1
            for leaf, tensor in leaves_of(output):
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
        found = dict(seen.items())
        aliases = other_names(model)
        counts[label] = judge(expected, found, close=close, aliases=aliases)
        truth = Truth(model, args, kwargs, expected)
        for what, site in list(counts[label].others()):
            at_home = what == "renamed" and is_at_home(site, expected, found, close, aliases)
            if not is_explained(site, at_home, seen.coverage(), truth):
                counts[label].unexplained += 1
                counts[label].details.append(f"unexplained {site}")
    if compare:
        comparison = tt.compare(model, made, inputs=given)
        last = counts[list(hints)[-1]]
        last.verdict = comparison.outcome
        last.details += [] if comparison.outcome == "same" else [f"compared {comparison.verdict}"]
    return counts


def _faithful(expected: dict[str, Tensor], returned: Any, close: bool) -> bool:
    """Whether a form returns what the model returns. Some tracers drop an autocast block in silence."""
    own = [value for site, value in expected.items() if site.startswith(":output")]
    found = [value for _, value in leaves_of(returned)]
    return len(own) == len(found) and all(_same(a, b, close) for a, b in zip(own, found, strict=True))


def other_names(model: nn.Module) -> dict[str, str]:
    """The further names of modules that have several, each with the first: eager hooks know the first only."""
    inner = model.module if isinstance(model, nn.DataParallel) else model
    first = {id(module): path for path, module in inner.named_modules()}
    every = inner.named_modules(remove_duplicate=False)
    return {path: first[id(module)] for path, module in every if path != first[id(module)]}


def judge(
    expected: dict[str, Tensor],
    found: dict[str, Tensor],
    close: bool = False,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Count:
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
    for site in _made_up(expected, found, close, aliases):
        result.wrong += 1
        result.details.append(f"wrong: there is no {site}")
    return result


def _made_up(
    expected: dict[str, Tensor], found: dict[str, Tensor], close: bool, aliases: Mapping[str, str]
) -> Iterator[str]:
    """Sites of modules that returned no tensor, and values that their modules did not return."""
    paths = {read_name(site).path for site in expected}
    for site, value in found.items():
        name = read_name(site)
        placed = name.leaf.replace(
            ".", ""
        ).isdecimal()  # in tuples and lists, of which hooks by hand miss none
        if site in expected or (name.leaf and not placed and aliases.get(name.path, name.path) in paths):
            continue  # a leaf that hooks by hand did not look for, or one that is only numbered
        if placed:
            yield site
            continue
        own = [other for each, other in expected.items() if _is_of(each, name, aliases)]
        if not any(_same(value, other, close) for other in own):
            yield site


def _is_of(site: str, name: Name, aliases: Mapping[str, str]) -> bool:
    """Whether an eager site is of the module call that a bare name is of."""
    own = read_name(site)
    if name.path in aliases:  # under a further name a form counts the calls by themselves
        return (own.path, own.kind) == (aliases[name.path], name.kind)
    return own._replace(leaf="") == name


def is_at_home(
    site: str,
    expected: dict[str, Tensor],
    found: dict[str, Tensor],
    close: bool = False,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Whether a value came from its own module: under the bare name of its call or a further name, or numbered."""
    path, kind, _, _ = read_name(site)
    own = []
    for each, name in ((each, read_name(each)) for each in found):
        numbered = is_unplaced(name.leaf) and (aliases.get(name.path, name.path), name.kind) == (path, kind)
        if numbered or _is_of(site, name, aliases):
            own.append(each)
    return any(_same(found[each], expected[site], close) for each in own)


def _same(one: Tensor, other: Tensor, close: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    if close and one.is_floating_point():
        return torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
