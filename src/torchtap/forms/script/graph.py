"""Put the op into the graphs of a scripted or traced module of which no Python source is left.

Every method graph emits its own arguments on entry and its result before it returns, so loops, branches and
calls through interfaces need no special care. Instances of one class share one method graph; what a graph emits
therefore starts with an attribute of the instance, its path, and each instance has its own. It guarantees:
- the names are those of the eager model wherever TorchScript kept them (see `docs/forms.md` for traces);
- the edited module can be saved, loaded, frozen and trained like any other.

TorchScript runs a copy of a graph that was ever called, so an edit would be ignored in silence. `tapped_copy`
edits a copy of the module, whose graphs nobody has run; its parameters and buffers are the original's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torchtap._torch import add_script_text, script_methods, script_string_type
from torchtap.forms.op import op
from torchtap.forms.op.channel import CALL, SAME_CALL, marked
from torchtap.forms.script.copying import script_copy, script_modules
from torchtap.forms.script.traced import TracedNames, forward_methods
from torchtap.forms.script.types import begins_with_tensor, can_hold_tensors, emit_lines, field_names
from torchtap.spi import ModulePath, Name
from torchtap.torchscript import ScriptCore, ScriptGraph, ScriptMethod, ScriptNode, ScriptType, ScriptValue

__all__ = [
    "PATH_ATTRIBUTE",
    "assigned_attributes",
    "constant_sites",
    "inputs_of",
    "tapped_copy",
]

# Where an instance keeps its path; what a graph emits starts with it.
PATH_ATTRIBUTE = "_torchtap_path"


def tapped_copy(module: object, kinds_of: Mapping[str, Iterable[str]], prefix: str = "") -> nn.Module:
    """A copy of a scripted module that emits these kinds at these paths; ``prefix`` is a channel's."""
    op.register()
    copy = script_copy(module)
    constants = constant_sites(copy)
    present = {op.address(site)[1:3] for site in constants}
    for site, nodes in constants.items():
        for node in nodes:  # the same constant may be there several times
            node.s_("value", prefix + site.rpartition("|")[2])
    # Instances of one class share its graph, so a class emits what any of its instances is asked for.
    instances: dict[str, list[tuple[str, ScriptCore]]] = {}
    for path, instance in script_modules(copy).items():
        instances.setdefault(instance.qualified_name, []).append((path, instance))
    names = TracedNames(script_modules(module))
    for members in instances.values():
        asked = {(path, kind) for path, _ in members for kind in kinds_of.get(path, ())} - present
        _tap_class(members, {kind for _, kind in asked}, names, prefix)
    return copy


def _tap_class(
    members: list[tuple[str, ScriptCore]], kinds: set[str], names: TracedNames, prefix: str
) -> None:
    """Tell the instances of one class their paths, and have their graph emit some kinds."""
    put_in = members[0][1].hasattr(PATH_ATTRIBUTE)  # before any has it from here: an attribute is the class's
    for path, instance in members:
        if put_in:  # what it was instrumented under, which a further name is not
            known = str(instance.getattr(PATH_ATTRIBUTE)).rpartition("|")[2]
            instance.setattr(PATH_ATTRIBUTE, prefix + known)
        elif instance.hasattr(PATH_ATTRIBUTE):
            instance.setattr(PATH_ATTRIBUTE, prefix + path)
        else:
            add_script_text(instance, PATH_ATTRIBUTE, prefix + path)
    first_path, first = members[0]
    kinds = kinds - _kinds_in(first)
    for method_name, method in forward_methods(first).items() if kinds else ():
        traced = names if names.knows(first_path, method_name) or not first_path else None
        _edit(method, kinds, first_path, traced)


def inputs_of(method: ScriptMethod) -> list[tuple[str, ScriptType]]:
    """``(leaf, type)`` for each argument of a forward but ``self``: named, unless there is only one."""
    arguments = [(each.name, each.type) for each in method.schema.arguments[1:]]
    return [("", arguments[0][1])] if len(arguments) == 1 else arguments


def constant_sites(module: object) -> dict[str, list[ScriptNode]]:
    """The sites whose names are constants of a graph, with the nodes that hold them.

    Those of a trace of a model with carriers, and those of a frozen module, whose paths became constants.
    """
    found: dict[str, list[ScriptNode]] = {}
    for instance in script_modules(module).values():
        for method in forward_methods(instance).values():
            for name, at in (("torchtap::emit", 1), ("torchtap::emit_grad", 1), ("torchtap::call", 0)):
                for node in method.graph.findAllNodes(name):
                    source = node.inputsAt(at).node()
                    while (
                        source.kind() == "aten::add"
                    ):  # a leaf that is known only at run time: a list, a key
                        source = source.inputsAt(0).node()
                    if source.kind() == "prim::Constant":
                        found.setdefault(source.s("value"), []).append(source)
    return found


def assigned_attributes(instance: ScriptCore) -> tuple[str, ...]:
    """The attributes that a module's own methods assign to."""
    found: dict[str, None] = {}
    for method in script_methods(instance).values():
        graph = method.graph
        itself = next(graph.inputs())
        for node in graph.findAllNodes("prim::SetAttr"):
            if node.inputsAt(0).debugName() == itself.debugName():
                found[node.s("name")] = None
    return tuple(found)


def _kinds_in(instance: ScriptCore) -> set[str]:
    """The kinds that a class emits already, because its file was saved with taps."""
    found = set()
    for method in forward_methods(instance).values():
        for node in method.graph.findAllNodes("prim::Constant"):
            if node.hasAttributes() and node.output().type().kind() == "StringType":
                text = node.s("value")
                if text.startswith(":"):
                    found.add(op.address(text).kind)
    return found


def _edit(method: ScriptMethod, kinds: set[str], path: str, traced: TracedNames | None) -> None:
    graph = method.graph
    values = list(graph.inputs())
    first = next(iter(graph.nodes()), graph.return_node())
    arguments = inputs_of(method)
    if traced is not None:
        names = traced.inputs(path, method.name) if path else traced.root_inputs(method)
        arguments = [(leaf, jit_type) for leaf, (_, jit_type) in zip(names, arguments, strict=True)]
    given = [(leaf, jit_type, value) for (leaf, jit_type), value in zip(arguments, values[1:], strict=True)]
    for kind in sorted(kind for kind in kinds if kind.endswith("input")):
        _insert_call(graph, first, values[0], kind, given)
    (value,) = graph.outputs()
    for kind in sorted(kind for kind in kinds if kind.endswith("output")):
        returned = [("", value.type(), value)]
        if traced is not None and path:
            parts = _parts(graph, value)
            leaves = traced.outputs(path, method.name)
            returned = [(leaf, parts[position].type(), parts[position]) for position, leaf in leaves.items()]
        _insert_call(graph, graph.return_node(), values[0], kind, returned)
    graph.lint()


def _parts(graph: ScriptGraph, value: ScriptValue) -> list[ScriptValue]:
    """Return the elements of a tuple that a method returns, or the value if it is none."""
    if value.type().kind() != "TupleType":
        return [value]
    return [part for part, _ in _unpacked(graph, graph.return_node(), value, value.type())]


def _unpacked(
    graph: ScriptGraph, before: ScriptNode, value: ScriptValue, jit_type: ScriptType
) -> list[tuple[ScriptValue, ScriptType]]:
    unpack = graph.create("prim::TupleUnpack", [value], 0)
    unpack.insertBefore(before)
    parts = []
    for element in jit_type.elements():
        part = unpack.addOutput()
        part.setType(element)
        parts.append((part, element))
    return parts


def _insert_call(
    graph: ScriptGraph,
    before: ScriptNode,
    owner: ScriptValue,
    kind: str,
    found: list[tuple[str, ScriptType, ScriptValue]],
) -> None:
    """Emit what a call has of a kind, in front of a node. A call whose first value may be absent is counted apart."""
    found = [each for each in found if can_hold_tensors(each[1])]
    mark = CALL
    if not found or not begins_with_tensor(found[0][1]):
        callee = "def counted(site: str):\n    torch.ops.torchtap.call(site)\n    return None\n"
        _insert_function(graph, before, owner, callee, f":{mark}{kind}")
        mark = SAME_CALL
    for leaf, jit_type, value in found:
        _insert(graph, before, owner, value, jit_type, Name("", kind, leaf), mark)
        mark = SAME_CALL


def _insert(
    graph: ScriptGraph,
    before: ScriptNode,
    owner: ScriptValue,
    value: ScriptValue,
    jit_type: ScriptType,
    site: Name,
    mark: str,
) -> None:
    """Emit ``value`` in front of a node, under the owner's path; ``mark`` is that of its first tensor."""
    if not can_hold_tensors(jit_type):
        return
    if jit_type.kind() == "TupleType":
        # Taken apart here: the source of a function cannot name the class of somebody's named tuple.
        for name, (part, element) in zip(
            field_names(jit_type), _unpacked(graph, before, value, jit_type), strict=True
        ):
            if can_hold_tensors(element):
                leaf = site._replace(leaf=ModulePath(site.leaf) / name)
                _insert(graph, before, owner, part, element, leaf, mark)
                mark = SAME_CALL
        return
    lines = emit_lines(jit_type, "value", "site", site.kind)
    header = f"def emitted(site: str, value: {jit_type.annotation_str}):"
    source = "\n    ".join([header, *lines, "return None"]) + "\n"
    _insert_function(graph, before, owner, source, marked(str(site), mark), value)


def _insert_function(
    graph: ScriptGraph, before: ScriptNode, owner: ScriptValue, source: str, ending: str, *values: ScriptValue
) -> None:
    """Run a function of a site and values in front of a node. The site is the owner's path and ``ending``."""
    try:
        unit = torch.jit.CompilationUnit(source)
    except RuntimeError:
        return  # a type that cannot be written down outside its own file, e.g. a list of named tuples
    with graph.insert_point_guard(before):
        path = graph.create("prim::GetAttr", [owner], 1)
        path.s_("name", PATH_ATTRIBUTE)
        path.output().setType(script_string_type())
        graph.insertNode(path)
        text = graph.insertConstant(ending)
        joined = graph.create("aten::add", [path.output(), text], 1)
        joined.output().setType(script_string_type())
        graph.insertNode(joined)
        (function,) = unit.get_functions()
        graph.insertGraph(function.graph, [joined.output(), *values])
