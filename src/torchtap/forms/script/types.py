"""TorchScript source that hands every tensor inside a typed value to the op.

Used where a scripted module is made from Python (`source`) and where only its graph is left
(`graph`). The type alone says what there is: tensors, optionals, lists, dictionaries with text or
number keys, tuples and named tuples, in any nesting, and values of any type as far as TorchScript can ask for theirs.
"""

from __future__ import annotations

import re

from torchtap.torchscript import ScriptType

__all__ = ["begins_with_tensor", "can_hold_tensors", "emit_lines", "field_names"]

_LONGEST_TUPLE = 4  # among values of any type


def can_hold_tensors(jit_type: ScriptType) -> bool:
    """Return True if a value of this type has tensors that `emit_lines` reaches."""
    kind = jit_type.kind()
    if kind in ("TensorType", "AnyType"):
        return True
    if kind == "DictType":
        key, value = jit_type.containedTypes()
        return key.kind() in ("StringType", "IntType") and can_hold_tensors(value)
    if kind in ("OptionalType", "ListType", "TupleType"):
        return any(can_hold_tensors(each) for each in jit_type.containedTypes())
    return False


def begins_with_tensor(jit_type: ScriptType) -> bool:
    """Return True if the first tensor of a value of this type is always there."""
    if jit_type.kind() == "TupleType":
        return next(
            (begins_with_tensor(each) for each in jit_type.elements() if can_hold_tensors(each)), False
        )
    return jit_type.kind() == "TensorType"


def field_names(jit_type: ScriptType) -> list[str]:
    """The names of a tuple's elements: its fields, or their numbers."""
    count = len(jit_type.elements())
    named = re.fullmatch(r"NamedTuple\((.*)\)", str(jit_type.str()), re.DOTALL)
    if named is not None:
        fields = re.findall(r"(?:^|, )(\w+) : ", _flattened(named.group(1)))
        if len(fields) == count:
            return fields
    return [str(position) for position in range(count)]


def _flattened(fields: str) -> str:
    """The text of a named tuple's fields without what is inside their types."""
    depth, kept = 0, []
    for character in fields:
        depth -= character in ")]"
        if depth == 0:
            kept.append(character)
        depth += character in "(["
    return "".join(kept)


def emit_lines(jit_type: ScriptType, value: str, address: str, kind: str, depth: int = 0) -> list[str]:
    """Lines that emit the tensors in the variable ``value``; ``address`` is an expression for path, kind and leaf."""
    here = f"_t{depth}"
    match jit_type.kind():
        case "TensorType":
            name = "emit_grad" if kind.startswith("grad") else "emit"
            return [f"torch.ops.torchtap.{name}({value}, {address})"]
        case "OptionalType":
            inner = emit_lines(jit_type.containedTypes()[0], here, address, kind, depth + 1)
            return [f"{here} = {value}", f"if {here} is not None:", *_indented(inner)]
        case "ListType":
            leaf = f'{address} + "." + str(_i{depth})'
            inner = emit_lines(jit_type.containedTypes()[0], here, leaf, kind, depth + 1)
            return [f"for _i{depth}, {here} in enumerate({value}):", *_indented(inner)]
        case "DictType":
            leaf = f'{address} + "." + str(_k{depth})'
            inner = emit_lines(jit_type.containedTypes()[1], here, leaf, kind, depth + 1)
            return [f"for _k{depth}, {here} in {value}.items():", *_indented(inner)]
        case "AnyType":
            return _lines_of_any(value, address, kind, here, depth)
        case "TupleType":
            lines = []
            for position, (name, element) in enumerate(
                zip(field_names(jit_type), jit_type.elements(), strict=True)
            ):
                if can_hold_tensors(element):
                    part = f"{here}_{position}"
                    lines += [f"{part} = {value}[{position}]"]
                    lines += emit_lines(element, part, f'{address} + ".{name}"', kind, depth + 1)
            return lines
    return []


def _lines_of_any(value: str, address: str, kind: str, here: str, depth: int) -> list[str]:
    """A value of any type, as in a dictionary of mixed values: a tensor, or a list, tuple or dictionary of tensors."""
    name = "emit_grad" if kind.startswith("grad") else "emit"
    number, key = f"_i{depth}", f"_k{depth}"
    call = f"torch.ops.torchtap.{name}"
    tuples = []
    for count in range(1, _LONGEST_TUPLE + 1):  # TorchScript asks for one length at a time
        tuples.append(f"elif isinstance({here}, Tuple[{', '.join(['torch.Tensor'] * count)}]):")
        tuples += [f'    {call}({here}[{at}], {address} + ".{at}")' for at in range(count)]
    return [
        f"{here} = {value}",
        f"if isinstance({here}, torch.Tensor):",
        f"    {call}({here}, {address})",
        *tuples,
        f"elif isinstance({here}, List[torch.Tensor]):",
        f"    for {number}, {here}_item in enumerate({here}):",
        f'        {call}({here}_item, {address} + "." + str({number}))',
        f"elif isinstance({here}, Dict[str, torch.Tensor]):",
        f"    for {key}, {here}_value in {here}.items():",
        f'        {call}({here}_value, {address} + "." + {key})',
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines] or ["    pass"]
