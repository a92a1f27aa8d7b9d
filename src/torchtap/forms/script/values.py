"""Every value of a traced or scripted model, from one run; and a copy that emits chosen ones under eager names.

A value's key is the path of the module, the method, and the number of the value among those of its graph. Loops and
branches inside a method are not looked into: what they make has a key where it comes out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from torchtap.forms.match.choose import CallKeys, FormValues
from torchtap.forms.match.recorder import PrintRecorder
from torchtap.forms.op import op
from torchtap.forms.script.copying import script_copy, script_modules
from torchtap.forms.script.traced import TracedNames, forward_methods
from torchtap.torchscript import ScriptGraph, ScriptMethod, ScriptValue

__all__ = ["digest_of", "script_values", "tap_values"]

_SEPARATOR = "/"


def digest_of(copy: object) -> str:
    """Tells models apart: the operations of each method, in order. To be asked of a `script_copy`."""
    text = "\n".join(f"{key} {value.node().kind()}" for key, _, value in _keyed(copy))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _keyed(copy: object) -> Iterator[tuple[str, ScriptMethod, ScriptValue]]:
    """``(key, method, value)`` for every tensor in the methods of a copy."""
    instances = script_modules(copy)
    classes = Counter(instance.qualified_name for instance in instances.values())
    for path, instance in instances.items():
        if classes[instance.qualified_name] > 1:
            continue  # they share their methods; what a method emits would be of all of them
        for name, method in forward_methods(instance).items():
            graph = method.graph
            produced = [value for node in graph.nodes() for value in node.outputs()]
            number = 0
            for value in (*graph.inputs(), *produced):
                if value.type().kind() == "TensorType":
                    yield _SEPARATOR.join((path.replace(".", "-"), name, str(number))), method, value
                    number += 1


def script_values(
    model: object,
    run: Callable[[nn.Module], object],
    run_again: Callable[[nn.Module], object] | None = None,
) -> FormValues:
    """Run a copy of a model and take the print of each value in its methods; ``run_again`` takes other inputs."""
    op.register()
    recorder = PrintRecorder()
    copy = script_copy(model)
    digest = digest_of(copy)
    values = list(_keyed(copy))
    calls = _calls(copy, values)
    for key, method, value in values:
        _emit_after(method.graph, value, recorder.address(key), gradient=True)
        _emit_after(method.graph, value, recorder.address(key), gradient=False)
    other = PrintRecorder(recorder.channel)
    recorder.record(lambda: run(copy))
    if run_again is not None:
        other.record(lambda: run_again(copy))
    return FormValues(digest, recorder.prints, calls, other.prints, recorder.gradients)


def _calls(
    copy: object, values: list[tuple[str, ScriptMethod, ScriptValue]]
) -> dict[tuple[str, int], CallKeys]:
    key_of = {(_name_of(method), value.debugName()): key for key, method, value in values}
    found: dict[tuple[str, int], CallKeys] = {}
    instances = script_modules(copy)
    traced = TracedNames(instances)
    for path, instance in instances.items():
        for number, (name, method) in enumerate(forward_methods(instance).items()):
            names = {debug: key for (owner, debug), key in key_of.items() if owner == _name_of(method)}
            graph = method.graph
            (out,) = graph.outputs()
            returned = list(out.node().inputs()) if out.node().kind() == "prim::TupleConstruct" else [out]
            entering = _keys(graph.inputs(), names)
            certain = [returned[n] for n in traced.returned(path, name) if n < len(returned)]
            found[path, number] = CallKeys(
                entering=entering,
                inside=tuple(names.values()),
                leaving=_keys(returned, names),
                given=entering if traced.inputs(path, name) == [""] else (),
                returned=_keys(certain, names),
            )
    return found


def _keys(values: Iterable[ScriptValue], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names[value.debugName()] for value in values if value.debugName() in names)


def _name_of(method: ScriptMethod) -> str:
    """Tells methods apart."""
    return f"{method.owner.qualified_name}.{method.name}"


def tap_values(copy: object, sites: Iterable[tuple[str, str]], prefix: str) -> None:
    """Emit these sites, each from the value with its key."""
    by_key: dict[str, list[str]] = {}
    for site, key in sites:
        by_key.setdefault(key, []).append(site)
    for key, method, value in list(_keyed(copy)):
        for site in reversed(by_key.get(key, [])):
            gradient = op.address(site).kind.startswith("grad")
            _emit_after(method.graph, value, prefix + site, gradient=gradient)


def _emit_after(graph: ScriptGraph, value: ScriptValue, site: str, *, gradient: bool) -> None:
    """Emit a value as soon as it is there, before anything can change it in place."""
    name = "emit_grad" if gradient else "emit"
    node = value.node()
    first = next(iter(graph.nodes()), graph.return_node())
    with graph.insert_point_guard(first):
        text = graph.insertConstant(site).node()
        call = graph.create(f"torchtap::{name}", [value, text.output()], 0)
        graph.insertNode(call)
    if node.kind() != "prim::Param":
        text.moveAfter(node)
        call.moveAfter(text)
