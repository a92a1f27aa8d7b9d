"""Which name the tensors that go in and out of a traced module have.

``torch.jit.trace`` keeps the modules, but gives each a signature of its own: it takes the tensors that it used and
returns those that something outside used. As for a graph (`torchtap.forms.graph.naming`), a tensor has the name that
eager gives it only if nothing else is possible; any other is numbered. The outermost module keeps its signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

from torchtap._torch import script_methods
from torchtap.forms.graph.leaks import (
    can_leak,
    is_meddled_with,
    is_torch_class,
    returns_structure,
    takes_one,
    takes_several,
)
from torchtap.spi import ModulePath, Name, reasons
from torchtap.torchscript import ScriptCore, ScriptGraph, ScriptMethod, ScriptNode, ScriptValue

__all__ = ["TracedNames", "forward_methods"]

# Operations that may return the tensor itself that they are given.
_HANDS_ON = frozenset(
    f"aten::{name}"
    for name in (
        "to",
        "contiguous",
        "type_as",
        "flatten",
        "dropout",
        "alpha_dropout",
        "feature_dropout",
        "alias",
    )
)


class _Origin(NamedTuple):
    """Where a value of a method comes from."""

    given: int | None = None  # the argument that it is
    changed: bool = False  # whether that was changed in place
    child: tuple[str, str, int] | None = (
        None  # the module inside that returned it, its method and the position
    )
    leaks: bool = False  # whether it may have left a module by another way than its return


def forward_methods(instance: ScriptCore) -> dict[str, ScriptMethod]:
    """The methods that are calls of a module, by name.

    A trace gives a module that is called again a further method: forward, forward1, forward2 … An overloaded forward,
    as recurrent layers have, is compiled as forward__0, forward__1 …
    """
    methods = script_methods(instance).items()
    return {name: method for name, method in methods if re.fullmatch(r"forward(?:__)?\d*", name)}


@final
class TracedNames:
    """Asked about the methods of one traced model; knows nothing of scripted ones."""

    def __init__(self, instances: Mapping[str, ScriptCore]) -> None:
        self._instances = instances
        self.is_traced = any(
            _is_traced_line(node.sourceRange()) or "argument_" in str(method.schema)
            for instance in instances.values()
            for method in forward_methods(instance).values()
            for node in method.graph.nodes()
        )

    def knows(self, path: str, method: str) -> bool:
        """Return True if a method was traced, and so has a signature of its own."""
        if not path or not self.is_traced:
            return False
        nodes = self._method(path, method).graph.nodes()
        return not any(_is_scripted_line(node.sourceRange()) for node in nodes)

    def inputs(self, path: str, method: str) -> list[str]:
        """The leaf of each argument."""
        count = len(list(self._method(path, method).graph.inputs())) - 1
        described = self._class(path)
        around = [self._class(each) for each in self._paths_around(path)]
        trusted = is_torch_class(described) or not any(map(can_leak, around))
        if count == 1 and takes_one(described) and trusted:
            return [""]
        return [Name.unplaced(position, doubtful=not trusted) for position in range(count)]

    def root_inputs(self, method: ScriptMethod) -> list[str]:
        """The leaf of each argument of the outermost module. A trace lists only the arguments that were given."""
        names = [each.name for each in method.schema.arguments[1:]]
        alone = len(names) == 1 and not (self.is_traced and takes_several(self._class("")))
        return [""] if alone else names

    def outputs(self, path: str, method: str) -> dict[int, str]:
        """The leaf of each tensor that comes out, by its position; those that were only handed on are left out."""
        origins = self._origins(path, method)
        made = [n for n, origin in origins.items() if origin.given is None or origin.changed]
        returned = self.returned(path, method)
        if len(returned) == 1 and not self._in_structure(path, method, returned[0]):
            others = [n for n in made if n not in returned]
            return {returned[0]: "", **{n: Name.unplaced(k, doubtful=True) for k, n in enumerate(others)}}
        doubtful = len(returned) != len(made)
        return {n: Name.unplaced(k, doubtful=doubtful) for k, n in enumerate(made or origins)}

    def _in_structure(self, path: str, method: str, position: int) -> bool:
        """Return True if a value may stand in a tuple or dict that the module, or one inside, returned."""
        origin = self._origin_out(path, method, position)
        of_child = origin.child is not None and self._in_structure(*origin.child)
        return returns_structure(self._class(path), of_child)

    def returned(self, path: str, method: str) -> list[int]:
        """The positions of tensors of which it is proved that the module returned them, in whatever structure."""
        origins = self._origins(path, method)
        if len(origins) == 1 and is_torch_class(self._class(path)):
            return [0]
        if can_leak(self._class(path)) or any(
            map(is_meddled_with, map(self._class, self._paths_around(path)))
        ):
            return []
        return [n for n, each in origins.items() if each.given is None and not (each.leaks or each.changed)]

    def _paths_around(self, path: str) -> list[str]:
        return [path, *ModulePath(path).parents]

    def _origins(self, path: str, method: str) -> dict[int, _Origin]:
        count = _count_out(self._method(path, method).graph)
        return {n: self._origin_out(path, method, n) for n in range(count)}

    def brings(self, path: str, kind: str) -> bool:
        """Return True if any call of a module has a tensor of this kind."""
        methods = forward_methods(self._instances[path]).values()
        if kind.endswith("input"):
            return any(len(list(method.graph.inputs())) > 1 for method in methods)
        return any(each.type().kind() != "NoneType" for method in methods for each in method.graph.outputs())

    def calls_without_name(self, path: str, kind: str) -> Iterator[tuple[int, str]]:
        """The calls of a module that cannot have their eager name, by number, each with the reason."""
        if not all(self.knows(path, method) for method in self._calls(path)):
            return
        leaves_of = self.inputs if kind.endswith("input") else self.outputs
        for number, method in enumerate(self._calls(path)):
            if not leaves_of(path, method):
                yield number, reasons.NO_OPERATION

    def _calls(self, path: str) -> list[str]:
        """The methods of a module's calls, in their order: forward, forward1, forward2 …"""
        return sorted(forward_methods(self._instances[path]), key=lambda name: (len(name), name))

    def _method(self, path: str, method: str) -> ScriptMethod:
        return script_methods(self._instances[path])[method]

    def _class(self, path: str) -> str:
        """The dotted name of the class that a module was traced from."""
        name = self._instances[path].qualified_name if path in self._instances else ""
        parts = ModulePath(name.removeprefix("__torch__.")).parts
        return ".".join(part for part in parts if not part.startswith("___torch_mangle_"))

    def _origin_out(self, path: str, method: str, position: int) -> _Origin:
        (value,) = self._method(path, method).graph.outputs()
        node = value.node()
        if value.type().kind() != "TupleType":
            return self._origin(path, value)
        if node.kind() == "prim::TupleConstruct":
            return self._origin(path, node.inputsAt(position))
        return self._origin_of_call(path, node, position) if node.kind() == "prim::CallMethod" else _Origin()

    def _origin(self, path: str, value: ScriptValue) -> _Origin:
        node = value.node()
        kind = node.kind()
        if kind == "prim::Param":
            return _Origin(_place(node, value) - 1)
        if kind == "prim::CallMethod":
            return self._origin_of_call(path, node, 0)
        if kind == "prim::TupleUnpack" and node.inputsAt(0).node().kind() == "prim::CallMethod":
            return self._origin_of_call(path, node.inputsAt(0).node(), _place(node, value))
        if kind in _HANDS_ON and not _casts(node):
            return self._origin(path, node.inputsAt(0))
        if kind.startswith("aten::") and kind.endswith("_") and not kind.endswith("__"):
            return self._origin(path, node.inputsAt(0))._replace(changed=True)
        return _Origin()

    def _origin_of_call(self, path: str, node: ScriptNode, position: int) -> _Origin:
        called = node.inputsAt(0).node()
        if called.kind() != "prim::GetAttr":
            return _Origin()
        names = [called.s("name")]
        while called.inputsAt(0).node().kind() == "prim::GetAttr":
            called = called.inputsAt(0).node()
            names.insert(0, called.s("name"))
        child = ModulePath(path) / ".".join(names)
        if child not in self._instances:
            return _Origin()
        inner = self._origin_out(child, node.s("name"), position)
        if inner.given is not None:
            outer = self._origin(path, node.inputsAt(1 + inner.given))
            return outer._replace(changed=outer.changed or inner.changed)
        return _Origin(
            child=(child, node.s("name"), position), leaks=inner.leaks or can_leak(self._class(child))
        )


def _casts(node: ScriptNode) -> bool:
    """Return True if the types in the graph tell that an operation makes another tensor."""
    given, made = node.inputsAt(0).type(), node.output().type()
    if given.kind() != "TensorType" or made.kind() != "TensorType":
        return False
    return given.dtype() is not None and made.dtype() is not None and given.dtype() != made.dtype()


def _count_out(graph: ScriptGraph) -> int:
    (value,) = graph.outputs()
    kind = value.type().kind()
    return len(value.type().elements()) if kind == "TupleType" else int(kind == "TensorType")


def _is_traced_line(text: str) -> bool:
    return re.match(r"\S.*\(\d+\): ", text) is not None


def _is_scripted_line(text: str) -> bool:
    """Return True if a line of Python source was compiled. What a loaded trace's own code adds is of no file."""
    return re.match(r'\s*File "(?!"|code/__torch__)', text) is not None


def _place(node: ScriptNode, value: ScriptValue) -> int:
    """Which of a node's outputs a value is."""
    return [each.debugName() for each in node.outputs()].index(value.debugName())
