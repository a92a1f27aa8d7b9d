"""One architecture in one form, site by site, beside hand-written hooks on the eager model.

For each input and output of the eager model, and the gradients of both:
- clean: the form has this name, and the value is the eager one;
- wrong: the form has this name on another value;
- plain: the form has the value under the module's plain name, without a leaf, and no other;
- renamed: the form has the value, under another name;
- missing: the form does not have the value.

A site whose value is not under its module's own name has to be explained by the coverage; ``unexplained`` are those of
which it says nothing, or something that a run of the eager model shows to be untrue (`benchmarks.explained`). A site of
a module that the model does not have, or of a value that the module does not return, counts as wrong.

`every_form` runs them all and prints the table of docs/forms.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
    plain: int = 0
    renamed: int = 0
    missing: int = 0
    unexplained: int = 0
    verdict: str = ""
    details: list[str] = dataclasses.field(default_factory=list)

    def is_general(self, seen: tt.Seen) -> bool:
        """Whether the coverage says that the form may have forgotten modules, or numbers what it has."""
        return any("does not know it" in each.reason or "numbered" in each.reason for each in seen.coverage())

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


def reference_of_all(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradients: bool = True
) -> tuple[dict[str, Tensor], Any]:
    """Every input, output and gradient by name, from torch's own hooks; and what the model returned."""
    found: dict[str, Tensor] = {}
    calls: dict[tuple[str, str], int] = {}
    handles: list[Any] = []

    def keep(path: str, kind: str, leaves: list[tuple[str, Tensor]]) -> None:
        call = calls.get((path, kind), 0)
        calls[path, kind] = call + 1
        for leaf, tensor in leaves:
            end = (f".{leaf}" if leaf else "") + (f"#{call}" if call else "")
            found[f"{path}:{kind}{end}"] = tensor.detach().clone()
            if tensor.requires_grad:
                hook = partial(_keep_gradient, found, f"{path}:grad_{kind}{end}")
                handles.append(tensor.register_hook(hook))

    inner = model.module if isinstance(model, nn.DataParallel) else model
    for path, module in inner.named_modules():
        before = partial(_before, keep, path, parameters_of(module))
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(_after, keep, path)))
    returned = model(*args, **kwargs)
    if gradients:
        backward(returned)
    for handle in handles:
        handle.remove()
    return found, returned


def _keep_gradient(found: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    found[name] = gradient.clone()


def _before(keep: Any, path: str, names: list[str] | None, _: nn.Module, args: Any, kwargs: Any) -> None:
    leaves: list[tuple[str, Tensor]] = []
    for place, value in (*enumerate(args), *kwargs.items()):
        known = isinstance(place, int) and names is not None and place < len(names)
        name = names[place] if known and names is not None else str(place)
        alone = names is not None and len(names) == 1
        leaves += leaves_of(value, "" if alone else name)
    keep(path, "input", leaves)


def _after(keep: Any, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
    keep(path, "output", list(leaves_of(output)))


def parameters_of(module: nn.Module) -> list[str] | None:
    """The parameters of a forward by name; None if it takes any number."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    return [each.name for each in parameters]


def backward(returned: Any) -> None:
    """Differentiate a number that every result counts in, and leave no gradient on parameters."""
    ends = [value for _, value in leaves_of(returned) if value.requires_grad and value.is_floating_point()]
    if ends:
        sum((n + 2) * value.double().square().mean() for n, value in enumerate(ends)).backward()  # type: ignore[union-attr]


def parameter_gradients(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor | None] | None:
    """The gradients of a form's parameters by name, without taps; None if autograd refuses its code."""
    parameters = dict(model.named_parameters())
    for each in parameters.values():
        each.grad = None
    try:
        backward(model(*args, **kwargs))
    except RuntimeError:  # changed in place
        return None
    finally:
        found = {name: each.grad for name, each in parameters.items()}
        for each in parameters.values():
            each.grad = None
    return found


def _have_equal_gradients(
    own: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None] | None
) -> bool:
    if other is None:
        return False
    for one, two in ((own[name], other[name]) for name in own.keys() & other.keys()):
        if one is None or two is None:
            if any(each is not None and each.count_nonzero() for each in (one, two)):
                return False
        elif not _same(one, two, close=True):
            return False
    return True


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
    program = torch.export.export(_instrumented(model), *given)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return tt.load(path, unsafe=True)


TAPS = ("*:input", "*:output", "*:grad_input", "*:grad_output")


def _instrumented(model: nn.Module) -> nn.Module:
    return tt.instrument(model, *TAPS)  # type: ignore[no-any-return]


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
    "export, instrumented": lambda model, given: _exported(_instrumented(model), given),
    "trace, instrumented": lambda model, given: _traced(_instrumented(model), given),
    "AOTInductor, instrumented": _packaged,
}
# Forms that compute in another order: equal within a tolerance.
CLOSE = {"compile, inductor", "AOTInductor, instrumented"}
# Forms that do not tell every name: they are counted once more with `like=` the model at hand.
NAMELESS = {"export", "export, loaded", "trace", "trace, loaded", "FX"}
# Forms that take long to make are made of these.
SLOW = CLOSE
NO_BACKWARD = {"AOTInductor, instrumented"}
FEW = ("mlp", "vgg", "unet", "gru", "gpt", "experts", "siamese", "rms norm", "bert", "llama")


OTHER = "the form computes something else"  # the verdict on a form that torch made unfaithfully


def count(name: str, form: str, compare: bool = True) -> dict[str, Count]:
    """One architecture in one form, by how it was asked: as it is and, if it does not tell names, like the model."""
    model, args, kwargs = build(name)
    outputs = reference(model, args, kwargs)
    own = parameter_gradients(model, args, kwargs)
    expected, _ = reference_of_all(model, args, kwargs, gradients=own is not None)
    made = FORMS[form](model, (args, kwargs))
    # Tracers look into an autograd function and forget its backward: such a form has other gradients of its own.
    differentiable = own is not None and form not in NO_BACKWARD
    if own is not None and differentiable and form != "eager":
        differentiable = _have_equal_gradients(own, parameter_gradients(made, args, kwargs))
    if not differentiable:
        expected = {site: value for site, value in expected.items() if ":grad_" not in site}
    given = kwargs or args
    counts: dict[str, Count] = {}
    hints: dict[str, dict[str, Any]] = {form: {}}
    if form in NAMELESS:
        hints[f"{form}, like the model"] = {"like": model, "inputs": given}
    for label, hint in hints.items():
        with tt.capture(made, *(TAPS if differentiable else TAPS[:2]), **hint) as seen:
            returned = made(*args, **kwargs)
            if differentiable:
                backward(returned)
        # Some compiled models are right to the last bit but one.
        close = form in CLOSE or ("compile" in form and not _faithful(outputs, returned, close=False))
        if not _faithful(outputs, returned, close):
            return {label: Count(sites=len(expected), verdict=OTHER) for label in hints}
        found = dict(seen.items())
        aliases = other_names(model)
        counts[label] = judge(expected, found, close=close, aliases=aliases, by_plain_name=seen.get)
        truth = Truth(model, args, kwargs, outputs)
        told = {read_name(each.site).bare for each in seen.coverage()}
        for what, site in list(counts[label].others()):
            if site not in outputs:  # of these it is only asked that something is said of their place
                counts[label].unexplained += read_name(site).bare not in told and not counts[
                    label
                ].is_general(seen)
                continue
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
    by_plain_name: Callable[[str], Any] = lambda name: None,
) -> Count:
    """The eager sites beside what a form gave."""
    result = Count(sites=len(expected))
    leaves: Counter[str] = Counter(str(read_name(site)._replace(leaf="")) for site in expected)
    for site, value in expected.items():
        plain = str(read_name(site)._replace(leaf=""))
        given = by_plain_name(plain) if site not in found and leaves[plain] == 1 else None
        if site in found:
            what = "clean" if _same(found[site], value, close) else "wrong"
        elif isinstance(given, Tensor):
            what = "plain" if _same(given, value, close) else "wrong"
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
    if one.is_floating_point() and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
        return True  # gradients are summed in another order
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
