"""The places of a model: which modules and sites it has, and how a selector picks them.

How a name is written is known to `names`. Nothing here puts a hook on a model or reads a value. It guarantees:
- wrappers (``torch.compile``, DDP, FSDP, checkpoint wrappers) leave no trace in a name;
- a module or parameter that is registered twice has one site, under its first name, and is found by all its names;
- a selector that picks nothing says which names are nearest.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast, final

from torch import nn

from torchtap.errors import PlanError
from torchtap.plan.names import (
    KINDS,
    WRAPPED_ATTRIBUTES,
    WRAPPER_CLASSES,
    Kind,
    first_part,
    join_path,
    last_part,
    parse_name,
    path_parts,
    regex_parts,
    selector_parts,
    site_name,
)

__all__ = [
    "Place",
    "Selectable",
    "Selector",
    "Site",
    "input_names",
    "places",
    "selectors_of",
    "unwrap",
]


@final
@dataclass(frozen=True, slots=True)
class Site:
    """A named place that a value passes, with its module if it is bound to a model."""

    path: str
    kind: Kind
    leaf: str = ""
    call: int = 0
    module: nn.Module | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return site_name(self.path, self.kind, self.leaf, self.call)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Site:
        """The site of a full name, e.g. ``blocks.0.attn:output.1#2``."""
        path, kind, leaf, call = parse_name(name)
        return cls(path, cast("Kind", kind), leaf, call)


@final
class Place(NamedTuple):
    """A module of a model under its clean path; ``other_paths`` are further names of the same module."""

    path: str
    module: nn.Module
    other_paths: tuple[str, ...] = ()


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of wrappers."""
    while True:
        inner = _wrapped(module)
        if inner is None:
            return module
        module = inner


def _wrapped(module: nn.Module) -> nn.Module | None:
    children: Any = module._modules
    if not isinstance(children, dict):
        return None  # TorchScript's, which wraps nothing
    for name in WRAPPED_ATTRIBUTES:
        if (child := children.get(name)) is not None:
            return child  # type: ignore[no-any-return]
    if type(module).__name__ in WRAPPER_CLASSES:
        return children.get("module")
    return None


def places(model: nn.Module) -> list[Place]:
    """Every module of a model, parents first, wrappers left out."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    _find_places(model, "", found)
    # The children of a shared module are reached by each of its names as well.
    for module, paths in list(found.values()):
        for other in paths[1:]:
            for path, child in _descendants(module, other):
                names = found[id(child)][1]
                if path not in names:
                    names.append(path)
    return [Place(paths[0], module, tuple(paths[1:])) for module, paths in found.values()]


def _find_places(module: nn.Module, path: str, found: dict[int, tuple[nn.Module, list[str]]]) -> None:
    # No function inside `places`: one that calls itself is a cycle, which would hold the model.
    module = unwrap(module)
    known = found.get(id(module))
    if known is not None:
        known[1].append(path)
        return
    found[id(module)] = (module, [path])
    for name, child in module._modules.items():
        if child is not None:
            _find_places(child, join_path(path, name), found)


def _descendants(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            child = unwrap(child)
            child_path = join_path(path, name)
            yield child_path, child
            yield from _descendants(child, child_path)


def input_names(module: nn.Module) -> tuple[str, ...] | None:
    """Names of the leaves of a forward's positional inputs, or ``("",)`` where there is only one to speak of.

    ``None`` says that the signature tells nothing (``*args``, a builtin): inputs are then named by index.
    """
    schema = getattr(module.forward, "schema", None)  # a scripted forward has no Python signature
    if schema is not None:
        names = tuple(argument.name for argument in schema.arguments[1:])
        return names if len(names) != 1 else ("",)
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if len(names) == 1 and len(parameters) == 1:
        return ("",)
    return names


Predicate: TypeAlias = Callable[[Site], bool]
Selectable: TypeAlias = "str | nn.Module | type[nn.Module] | Predicate | Selector"


@final
@dataclass(frozen=True, slots=True)
class Selector:
    """Picks sites. ``picks_port`` decides on what is known before the model runs, ``picks_leaf`` on the rest."""

    text: str
    picks_port: Callable[[Site], bool] = field(compare=False, repr=False)
    picks_leaf: Callable[[Site], bool] = field(compare=False, repr=False)
    kinds: frozenset[Kind] = frozenset(KINDS)  # no other kind needs to be asked about
    whole: bool = True  # picks a port with all its leaves and calls, or none of them
    plain_path: str | None = None  # the module's path where it is written without a wildcard
    made_of: tuple[Selectable, Kind] = field(default=("", "output"), compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return (
            Selector.of,
            self.made_of,
        )  # for processes that are spawned: what it was made of travels, not its rules

    def meant_in(self, paths: Collection[str]) -> Selector:
        """What it means in a model with these modules: the full path of a module means that module alone."""
        path = self.plain_path
        if path is None or path not in paths:
            return self
        picks_port = self.picks_port
        return replace(self, picks_port=lambda site: site.path == path and picks_port(site))

    def picks(self, site: Site) -> bool:
        """Whether this site, its leaf and call known, is picked."""
        return self.picks_port(site) and self.picks_leaf(site)

    @classmethod
    def of(cls, selectable: Selectable, kind: Kind = "output") -> Selector:
        """A selector from text, a module, a module type or a predicate; ``kind`` is meant where none is written."""
        if isinstance(selectable, Selector):
            return selectable
        if isinstance(selectable, str):
            made = _from_regex(selectable) if selectable.startswith("re:") else _from_glob(selectable, kind)
        elif isinstance(selectable, type) and issubclass(selectable, nn.Module):
            made = _from_type(selectable, kind)
        elif isinstance(selectable, nn.Module):
            made = _from_module(selectable, kind)
        elif callable(selectable) and not isinstance(selectable, type):
            name = getattr(selectable, "__qualname__", repr(selectable))
            made = cls(f"<{name}>", selectable, selectable, whole=False)
        else:
            raise PlanError(
                f"a selector is text, a module or its type, or a predicate on sites; got {selectable!r}"
            )
        return replace(made, made_of=(selectable, kind))

    def __str__(self) -> str:
        return self.text


def _always(_: Site) -> bool:
    return True


def _from_type(module_type: type[nn.Module], kind: Kind) -> Selector:
    return Selector(
        site_name(module_type.__qualname__, kind),
        lambda site: site.kind == kind and isinstance(site.module, module_type),
        _always,
        kinds=frozenset((kind,)),
    )


def _from_module(module: nn.Module, kind: Kind) -> Selector:
    one = unwrap(module)
    return Selector(
        site_name(f"<this {type(one).__qualname__}>", kind),
        lambda site: site.kind == kind and site.module is one,
        _always,
        kinds=frozenset((kind,)),
    )


def _from_regex(text: str) -> Selector:
    try:
        pattern = re.compile(text[3:])
    except re.error as error:
        raise PlanError(f"selector {text!r} is not a regular expression: {error}") from None

    # Leaves and calls are known only once the model runs, so a port is bound when the expression could match
    # the bare name or any usual continuation of it; picks_leaf then decides on the full name.
    continuations = ("", *(f".{n}" for n in range(10)), "#1", ".0#1", ".weight", ".bias")
    path_part, rest = regex_parts(text[3:])
    try:
        path_pattern = None if path_part is None else re.compile(path_part)
    except re.error:
        path_pattern = None

    def picks_port(site: Site) -> bool:
        bare = site_name(site.path, site.kind)
        if any(pattern.fullmatch(bare + more) for more in continuations):
            return True
        names_leaf = re.match(rf"{site.kind}\\?[^a-z_]", rest) is not None
        return names_leaf and path_pattern is not None and path_pattern.fullmatch(site.path) is not None

    return Selector(text, picks_port, lambda site: pattern.fullmatch(site.name) is not None, whole=False)


def _from_glob(text: str, default_kind: Kind) -> Selector:
    path_text, kind_glob, leaf_glob, call_text = selector_parts(text, default_kind)
    kinds = frozenset(kind for kind in KINDS if fnmatch.fnmatchcase(kind, kind_glob))
    if not kinds:
        close = difflib.get_close_matches(kind_glob, KINDS, n=3, cutoff=0.3)
        raise PlanError(
            f"selector {text!r} asks for the kind {kind_glob!r}; the kinds are {', '.join(KINDS)}"
            + (f" (did you mean {close[0]!r}?)" if close else "")
        )
    path_matches = _path_pattern(path_text)

    picks_leaf = partial(_is_leaf, leaf_glob, call_text)

    def picks_port(site: Site) -> bool:
        # Parameters and buffers are listed leaf by leaf; inputs and outputs are not known yet.
        if site.kind not in kinds or not path_matches(site.path):
            return False
        return not site.leaf or picks_leaf(site)

    plain = None if any(sign in path_text for sign in "*?") else path_text
    return Selector(
        text, picks_port, picks_leaf, kinds=kinds, whole=not leaf_glob and not call_text, plain_path=plain
    )


def _spellings(site: Site) -> Iterator[str]:
    """A leaf's name and, for a named input, its position as well."""
    yield site.leaf
    if site.kind in ("input", "grad_input") and site.module is not None:
        first, rest = first_part(site.leaf)
        names = input_names(site.module) or ()
        if first in names:
            yield join_path(str(names.index(first)), rest) if rest else str(names.index(first))


def _is_leaf(leaf_glob: str, call_text: str, site: Site) -> bool:
    """Whether a site is of the leaves and calls that a selector asks for; no text asks for all."""
    if leaf_glob and not any(
        fnmatch.fnmatchcase(leaf, leaf_glob) or leaf.startswith(leaf_glob + ".") for leaf in _spellings(site)
    ):
        return False
    return not call_text or fnmatch.fnmatchcase(str(site.call), call_text)


def _path_pattern(text: str) -> Callable[[str], bool]:
    """The path rule of a glob: ``*`` is one component, ``**`` any number; without a dot it matches at any depth."""
    if text == "":
        return lambda path: path == ""
    if text in ("*", "**"):
        return lambda path: True
    if "." not in text:
        return lambda path: path != "" and (path == text or fnmatch.fnmatchcase(last_part(path), text))
    *outer, last = path_parts(text)
    pieces = [_ANY_AROUND if each == "**" else _component(each) + r"\." for each in outer]
    pieces.append(_ALL_INSIDE if last == "**" else _component(last))
    pattern = re.compile("".join(pieces))
    # A module may be called "[0]" or "a?": what a listing shows can be asked for as it stands.
    return lambda path: path == text or pattern.fullmatch(path) is not None


# "a.**" is all inside a, so at least one component; elsewhere "**" may stand for none.
_ALL_INSIDE = r"[^.]+(?:\.[^.]+)*"
_ANY_AROUND = r"(?:[^.]+\.)*"


def _component(text: str) -> str:
    """A glob of one component as a regular expression."""
    found = fnmatch.translate(text).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
    return found.replace(".*", "[^.]*").replace("(?>.*?", "(?>[^.]*?")


def selectors_of(
    value: Selectable | Sequence[Selectable] | None, kind: Kind = "output"
) -> tuple[Selector, ...]:
    """One selectable or a sequence of them, as selectors."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, (str, nn.Module)):
        return tuple(Selector.of(each, kind) for each in value)
    return (Selector.of(value, kind),)
