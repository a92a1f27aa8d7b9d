"""The grammar of a site's name, ``<module path>:<kind>[.<leaf>][#<call>]``: parsing, printing, wrappers.

No other file cuts a site's name or a module's path. This one knows text only: it imports no torch, so that runs
are read without it. It guarantees:
- a printed name parses back to the same parts, also where a leaf or a path has a colon, a dot or a ``#`` in it,
  as long as a leaf does not end like a call (``#2``);
- `read_name` takes any text, since names also come from files that somebody else wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, final, get_args

from torchtap.errors import SelectionError

__all__ = [
    "KINDS",
    "OF_CALLS",
    "WRAPPED_ATTRIBUTES",
    "WRAPPER_CLASSES",
    "Kind",
    "Name",
    "belongs_to",
    "call_of",
    "first_part",
    "is_inside",
    "is_unplaced",
    "join_path",
    "kind_of",
    "last_part",
    "parent_path",
    "parse_name",
    "path_and_rest",
    "path_of",
    "path_of_source",
    "path_parts",
    "paths_around",
    "read_name",
    "regex_parts",
    "selector_parts",
    "site_name",
    "unplaced",
    "without_compiler",
    "without_wrappers",
]

# Of a parameter's gradient, ``param_grad`` is what the optimizer uses; the longer kinds are its earlier stages.
Kind = Literal[
    "input",
    "output",
    "grad_input",
    "grad_output",
    "param",
    "param_grad",
    "buffer",
    "attention",
    "value",
    "param_grad_local",
    "param_grad_accumulated",
    "param_grad_unclipped",
    "update",
    "optim_state",
    "lr",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What goes in and out of a module's call, with its gradients.
OF_CALLS: tuple[Kind, ...] = ("input", "output", "grad_input", "grad_output")

# What wrappers call the module inside. These names are theirs alone.
WRAPPED_ATTRIBUTES = (
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Lightning Fabric, DeepSpeed
    "_wrapped_module",
)
# These call it ``module``, which is too common a name to go by alone.
WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel", "AveragedModel")

# The first colon that a kind follows ends the path: a leaf may be the key of a dict, and have colons of its own.
_NAME = re.compile(
    rf"(?P<path>.*?):(?P<kind>{'|'.join(KINDS)})(?:\.(?P<leaf>.*?))?(?:#(?P<call>[0-9]{{1,9}}))?", re.DOTALL
)
_FOREIGN = re.compile(
    r"(?:(?P<path>.*):)?(?P<kind>[^.#]*)(?:\.(?P<leaf>.*?))?(?:#(?P<call>[0-9]{1,9}))?(?:#.*)?", re.DOTALL
)


@final
class Name(NamedTuple):
    """The parts of a site's name. ``kind`` is one of `KINDS`, or whatever a foreign name has there."""

    path: str
    kind: str
    leaf: str = ""
    call: int = 0

    @property
    def bare(self) -> str:
        """The name without leaf and call."""
        return f"{self.path}:{self.kind}"

    def __str__(self) -> str:
        return site_name(*self)


def site_name(path: str, kind: str, leaf: str = "", call: int = 0) -> str:
    """A site's name from its parts."""
    return f"{path}:{kind}{'.' if leaf else ''}{leaf}{f'#{call}' if call else ''}"


def parse_name(name: str) -> Name:
    """The parts of a site's name; an error if it is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise SelectionError(
            f"{name!r} is not a site's name: it has to read <module path>:<kind>[.<leaf>][#<call>], "
            f"with one of the kinds {', '.join(KINDS)}"
        )
    return _parts(found)


def read_name(name: str) -> Name:
    """The parts of any text, as far as it has them. Text without a colon is the path of an output."""
    found = _NAME.fullmatch(name)
    if found is not None:
        return _parts(found)
    if ":" not in name:
        return Name(name, "output")
    foreign = _FOREIGN.fullmatch(name)
    return Name(name, "") if foreign is None else _parts(foreign)


def _parts(found: re.Match[str]) -> Name:
    return Name(found["path"] or "", found["kind"], found["leaf"] or "", int(found["call"] or 0))


def unplaced(number: int) -> str:
    """The leaf of a tensor that a form shows without telling where in a structure it belongs.

    No structure has such a leaf in an eager model, short of a dict with keys that begin with ``@``.
    """
    return f"@{number}"


def is_unplaced(leaf: str) -> bool:
    """Whether a leaf only numbers what a form shows."""
    return leaf.startswith("@")


def kind_of(name: str) -> str:
    """The kind in a site's name."""
    return read_name(name).kind


def path_of(name: str) -> str:
    """The module's path in a site's name."""
    return read_name(name).path


def call_of(name: str) -> int:
    """The call's number in a site's name."""
    return read_name(name).call


def belongs_to(name: str, bare: str) -> bool:
    """Whether ``name`` is the site ``bare``, or one of its leaves or calls."""
    return name == bare or name.startswith((f"{bare}.", f"{bare}#"))


def selector_parts(text: str, kind: str = "output") -> tuple[str, str, str, str]:
    """Path, kind, leaf and call as a selector writes them, each possibly with wildcards.

    ``kind`` is meant where none is written.
    """
    path, colon, rest = text.rpartition(":")
    if not colon:
        path, rest = text, kind
    rest, _, call = rest.partition("#")
    written_kind, _, leaf = rest.partition(".")
    return path, written_kind, leaf, call


def path_and_rest(name: str) -> tuple[str, str]:
    """A name's path, and the colon with all behind it; a name without a colon is a path."""
    path, colon, rest = name.rpartition(":")
    return (path, colon + rest) if colon else (name, "")


def regex_parts(pattern: str) -> tuple[str | None, str]:
    """What a regular expression over names says of the path, and of the rest; no path where it has no colon."""
    path, colon, rest = pattern.rpartition(":")
    return path if colon else None, rest


# -- paths of modules and leaves ------------------------------------------------------------------------------


def path_parts(path: str) -> list[str]:
    """The components of a path; none for the model itself."""
    return path.split(".") if path else []


def join_path(path: str, name: str) -> str:
    """The path of what is called ``name`` inside ``path``."""
    return f"{path}.{name}" if path else name


def parent_path(path: str) -> str:
    """The path around a path: that of the model where it has no other."""
    return path.rpartition(".")[0]


def last_part(path: str) -> str:
    """A path's own name in what is around it."""
    return path.rpartition(".")[2]


def first_part(leaf: str) -> tuple[str, str]:
    """The first component of a leaf, and the rest."""
    first, _, rest = leaf.partition(".")
    return first, rest


def paths_around(path: str) -> Iterator[str]:
    """The paths around a path, the innermost first and the model's last."""
    while path:
        path = parent_path(path)
        yield path


def is_inside(path: str, outer: str) -> bool:
    """Whether a path is inside another; the model has everything inside but itself."""
    return path.startswith(f"{outer}.") if outer else path != ""


def without_wrappers(path: str) -> str:
    """A path without what wrappers put into it. A module of the model's own called ``module`` is lost as well."""
    return ".".join(part for part in path_parts(path) if part != "module" and part not in WRAPPED_ATTRIBUTES)


def without_compiler(path: str) -> str:
    """A path without what ``torch.compile`` puts into it."""
    return ".".join(part for part in path_parts(path) if part != "_orig_mod")


# How Dynamo writes where it found a module: ``L['self']._modules['layers'][0]``.
_SOURCE = r"L\['(?:self|fn)'\]((?:\.\w+|\['[^']*'\]|\[\d+\])*)"
_STEP = r"[^\[\]'.]+"


def path_of_source(text: str) -> str | None:
    """The path that Dynamo's own writing means; None for a module that is not found on the model. A path is itself."""
    if re.match(r"[A-Z]\[|\w+\(", text) is None:
        return text
    found = re.fullmatch(_SOURCE, text)
    return (
        None
        if found is None
        else ".".join(step for step in re.findall(_STEP, found[1]) if step != "_modules")
    )
