"""Parse and print site names: ``<module path>:<kind>[.<leaf>][#<call>]``.

`Name` has the parts of a site's name and `ModulePath` those of a module's path. No other file splits either. This file
works on text and imports no torch, so that runs can be read without it. It guarantees:
- a printed name parses back to the same parts, also if a leaf or a path contains a colon, a dot or a ``#``,
  as long as a leaf does not end like a call (``#2``);
- `Name.read` accepts any text, because names also come from files written by others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, final, get_args

from torchtap.errors import SelectionError

__all__ = [
    "DOUBTFUL",
    "KINDS",
    "OF_CALLS",
    "WRAPPED_ATTRIBUTES",
    "WRAPPER_CLASSES",
    "Kind",
    "ModulePath",
    "Name",
    "OrderKey",
    "execution_order",
    "in_passing_order",
    "nearest_names",
    "no_such_site",
    "passes_modules",
    "regex_parts",
    "selector_parts",
]

# ``param_grad`` is the gradient that the optimizer uses; the longer kinds are its earlier stages.
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
# The inputs and outputs of a module's call, and their gradients.
OF_CALLS: tuple[Kind, ...] = ("input", "output", "grad_input", "grad_output")

# Attribute names that wrappers use for the module inside, and that no model uses.
WRAPPED_ATTRIBUTES = (
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",  # Lightning Fabric, DeepSpeed
    "_wrapped_module",
)
# These use ``module``, which models use too.
WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel", "AveragedModel")

DOUBTFUL = "?"  # ends the leaf of a tensor that may have left a module by another way than its return

# The first colon that is followed by a kind ends the path: a leaf may be a dict key that contains colons.
_NAME = re.compile(
    rf"(?P<path>.*?):(?P<kind>{'|'.join(KINDS)})(?:\.(?P<leaf>.*?))?(?:#(?P<call>[0-9]{{1,9}}))?", re.DOTALL
)
_FOREIGN = re.compile(
    r"(?:(?P<path>.*):)?(?P<kind>[^.#]*)(?:\.(?P<leaf>.*?))?(?:#(?P<call>[0-9]{1,9}))?(?:#.*)?", re.DOTALL
)
# A module as Dynamo writes it: ``L['self']._modules['layers'][0]``.
_SOURCE = r"L\['(?:self|fn)'\]((?:\.\w+|\['[^']*'\]|\[\d+\])*)"
_STEP = r"[^\[\]'.]+"


@final
class ModulePath(str):
    """The dotted path of a module, or of a leaf inside a structure. The empty path is the model itself.

    >>> path = ModulePath("blocks.0.attn")
    >>> path.parent, path.name, path / "q"
    ('blocks.0', 'attn', 'blocks.0.attn.q')
    """

    __slots__ = ()

    @property
    def parts(self) -> list[str]:
        """The components; none for the model itself."""
        return self.split(".") if self else []

    @property
    def parent(self) -> ModulePath:
        """The enclosing path."""
        return ModulePath(self.rpartition(".")[0])

    @property
    def parents(self) -> Iterator[ModulePath]:
        """The enclosing paths, innermost first, the model last."""
        path = self
        while path:
            path = path.parent
            yield path

    @property
    def name(self) -> str:
        """The last component."""
        return self.rpartition(".")[2]

    def __truediv__(self, name: str) -> ModulePath:
        return ModulePath(f"{self}.{name}" if self else name)

    def is_inside(self, outer: str) -> bool:
        """Return True if this path is strictly inside ``outer``."""
        return self.startswith(f"{outer}.") if outer else self != ""

    def split_first(self) -> tuple[str, str]:
        """Return the first component and the rest."""
        first, _, rest = self.partition(".")
        return first, rest

    def without_wrappers(self) -> ModulePath:
        """Drop the components that wrappers add. A module of the model's own named ``module`` is dropped too."""
        return ModulePath(
            ".".join(part for part in self.parts if part != "module" and part not in WRAPPED_ATTRIBUTES)
        )

    def without_compiler(self) -> ModulePath:
        """Drop the components that ``torch.compile`` adds."""
        return ModulePath(".".join(part for part in self.parts if part != "_orig_mod"))

    @classmethod
    def of_source(cls, text: str) -> ModulePath | None:
        """Read a path as Dynamo writes it. Return None for a module that is not part of the model."""
        if re.match(r"[A-Z]\[|\w+\(", text) is None:
            return cls(text)
        found = re.fullmatch(_SOURCE, text)
        if found is None:
            return None
        return cls(".".join(step for step in re.findall(_STEP, found[1]) if step != "_modules"))


@final
class Name(NamedTuple):
    """The parts of a site's name. ``kind`` is one of `KINDS`, or any text if the name was written by others.

    >>> name = Name.parse("blocks.0.attn:output.1#2")
    >>> name.kind, name.leaf, name.call, name.module.parent
    ('output', '1', 2, 'blocks.0')
    >>> str(name._replace(call=0))
    'blocks.0.attn:output.1'
    """

    path: str
    kind: str
    leaf: str = ""
    call: int = 0

    @classmethod
    def parse(cls, text: str) -> Name:
        """Return the parts of a site's name. Raise `SelectionError` if the text is not one."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise SelectionError(
                f"{text!r} is not a site's name: it has to read <module path>:<kind>[.<leaf>][#<call>], "
                f"with one of the kinds {', '.join(KINDS)}"
            )
        return _parts(found)

    @classmethod
    def read(cls, text: str) -> Name:
        """Return the parts of any text, as far as it has them. Text without a colon is the path of an output."""
        return _read(text)

    @property
    def module(self) -> ModulePath:
        """The module's path."""
        return ModulePath(self.path)

    @property
    def bare(self) -> str:
        """The name without leaf and call."""
        return f"{self.path}:{self.kind}"

    @property
    def rest(self) -> str:
        """The part of the name behind the path, with its colon."""
        return str(self)[len(self.path) :]

    @property
    def is_unplaced(self) -> bool:
        """True if the leaf only numbers a tensor of which the form does not know the position (`unplaced`)."""
        return self.leaf.startswith("@")

    def belongs_to(self, bare: str) -> bool:
        """Return True if this is the site ``bare``, or one of its leaves or calls."""
        name = str(self)
        return name == bare or name.startswith((f"{bare}.", f"{bare}#"))

    @staticmethod
    def unplaced(number: int, *, doubtful: bool = False) -> str:
        """Return the leaf for a tensor of which a form does not know the position in its structure.

        doubtful: it is not even known whether the module was given or returned it.

        Eager models have no such leaf, except for a dict with keys that begin with ``@``.
        """
        return f"@{number}{DOUBTFUL if doubtful else ''}"

    def __str__(self) -> str:
        leaf, call = self.leaf, self.call
        return f"{self.path}:{self.kind}{'.' if leaf else ''}{leaf}{f'#{call}' if call else ''}"


@lru_cache(maxsize=1 << 14)
def _read(text: str) -> Name:
    found = _NAME.fullmatch(text)
    if found is not None:
        return _parts(found)
    if ":" not in text:
        return Name(text, "output")
    foreign = _FOREIGN.fullmatch(text)
    return Name(text, "") if foreign is None else _parts(foreign)


def _parts(found: re.Match[str]) -> Name:
    return Name(found["path"] or "", found["kind"], found["leaf"] or "", int(found["call"] or 0))


# -- text of selectors ----------------------------------------------------------------------------------------


def selector_parts(text: str, kind: str = "output") -> tuple[str, str, str, str]:
    """Return path, kind, leaf and call of a selector, each possibly with wildcards. ``kind`` is the default."""
    path, colon, rest = text.rpartition(":")
    if not colon:
        path, rest = text, kind
    rest, _, call = rest.partition("#")
    written_kind, _, leaf = rest.partition(".")
    return path, written_kind, leaf, call


def regex_parts(pattern: str) -> tuple[str | None, str]:
    """Return the part of a regular expression that matches the path, None if it has no colon, and the rest."""
    path, colon, rest = pattern.rpartition(":")
    return path if colon else None, rest


def nearest_names(wanted: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return the names most similar to ``wanted``."""
    return tuple(difflib.get_close_matches(wanted, list(names), n=count, cutoff=0.4))


def no_such_site(wanted: str, names: Sequence[str], where: str, advice: str = "") -> SelectionError:
    """Return the error for a name or selector that matches none of ``names``."""
    nearest = nearest_names(wanted, names)
    if nearest:
        found = "the nearest are " + ", ".join(repr(name) for name in nearest)
    elif names:
        found = "there are " + ", ".join(repr(name) for name in names[:3]) + (" …" if len(names) > 3 else "")
    else:
        found = "there are none"
    plural = "site" if len(names) == 1 else "sites"
    message = f"{wanted!r} matches none of {where} {len(names)} {plural}; {found}."
    return SelectionError(f"{message} {advice}".rstrip(), nearest=nearest)


# -- the order of execution -----------------------------------------------------------------------------------

# Causes before effects: parameters; forward values; logged numbers such as the loss; gradients in reverse order; the
# state that a step leaves behind.
_FORWARD, _BACKWARD = 0, 2
_PHASE = {
    "param": -1,
    "value": 1,
    "grad_output": _BACKWARD,
    "grad_input": _BACKWARD,
    "param_grad_local": 3,
    "param_grad_accumulated": 3,
    "param_grad_unclipped": 4,
    "param_grad": 5,
    "buffer": 6,
    "update": 6,
    "optim_state": 6,
    "lr": 6,
}


def in_passing_order(names: Iterable[str]) -> list[str]:
    """Sort sites, given in forward order, by the order in which a step computes their values.

    Parameters exist before the forward pass, gradients are computed in reverse, and optimizer state is last.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(_PHASE.get(_read(name).kind, _FORWARD), []).append(name)
    groups.get(_BACKWARD, []).reverse()
    return [name for phase in sorted(groups) for name in groups[phase]]


def passes_modules(name: str) -> bool:
    """Return True if a value's place in the order depends on its module, not on its kind alone."""
    return _PHASE.get(_read(name).kind, _FORWARD) in (_FORWARD, _BACKWARD)


class OrderKey(NamedTuple):
    """Sort sites by execution."""

    phase: int
    call: int
    trail: tuple[float, ...]
    listed: int


def execution_order(sites: Sequence[str]) -> dict[str, OrderKey]:
    """Return a sorting key for each site.

    Modules keep the listed order, a module's input is before and its output after everything inside it, further calls
    are after the first, and gradients are in reverse.
    """
    place: dict[str, int] = {}
    names = [_read(site) for site in sites]
    for name in names:
        for path in (*reversed(tuple(name.module.parents)), name.path):
            place.setdefault(path, len(place))
    keys: dict[str, OrderKey] = {}
    for listed, (site, name) in enumerate(zip(sites, names, strict=True)):
        way = [name.path, *name.module.parents][:-1] if name.path else []
        trail: tuple[float, ...] = tuple(place[path] for path in reversed(way))
        phase = _PHASE.get(name.kind, _FORWARD)
        if phase == _BACKWARD:
            trail = tuple(-each for each in trail)
        late = name.kind in ("output", "grad_input")
        edge = float("inf") if late else float("-inf")
        keys[site] = OrderKey(phase, name.call, (*trail, edge), listed)
    return keys


# -- the same as functions, for callers that have not moved to `Name` and `ModulePath` ---------------------------


def site_name(path: str, kind: str, leaf: str = "", call: int = 0) -> str:
    """Return a site's name from its parts."""
    return f"{path}:{kind}{'.' if leaf else ''}{leaf}{f'#{call}' if call else ''}"


parse_name = Name.parse
read_name = Name.read
unplaced = Name.unplaced
path_of_source = ModulePath.of_source


def is_unplaced(leaf: str) -> bool:
    """Return True if a leaf only numbers a tensor."""
    return leaf.startswith("@")


def is_doubtful(leaf: str) -> bool:
    """Return True if it is not known whether a numbered tensor was given to its module or returned by it."""
    return leaf.startswith("@") and DOUBTFUL in ModulePath(leaf).split_first()[0]


def kind_of(name: str) -> str:
    """Return the kind in a site's name."""
    return _read(name).kind


def path_of(name: str) -> str:
    """Return the module's path in a site's name."""
    return _read(name).path


def belongs_to(name: str, bare: str) -> bool:
    """Return True if ``name`` is the site ``bare``, or one of its leaves or calls."""
    return name == bare or name.startswith((f"{bare}.", f"{bare}#"))


def path_and_rest(name: str) -> tuple[str, str]:
    """Return a name's path, and the colon with all behind it; a name without a colon is a path."""
    path, colon, rest = name.rpartition(":")
    return (path, colon + rest) if colon else (name, "")


def path_parts(path: str) -> list[str]:
    """Return the components of a path; none for the model itself."""
    return path.split(".") if path else []


def join_path(path: str, name: str) -> str:
    """Return the path of ``name`` inside ``path``."""
    return f"{path}.{name}" if path else name


def parent_path(path: str) -> str:
    """Return the enclosing path."""
    return path.rpartition(".")[0]


def last_part(path: str) -> str:
    """Return the last component of a path."""
    return path.rpartition(".")[2]


def first_part(leaf: str) -> tuple[str, str]:
    """Return the first component of a leaf, and the rest."""
    return ModulePath(leaf).split_first()


def paths_around(path: str) -> Iterator[str]:
    """Return the enclosing paths, innermost first."""
    return ModulePath(path).parents


def is_inside(path: str, outer: str) -> bool:
    """Return True if a path is strictly inside another."""
    return ModulePath(path).is_inside(outer)


def without_wrappers(path: str) -> str:
    """Return a path without what wrappers add to it."""
    return ModulePath(path).without_wrappers()


def without_compiler(path: str) -> str:
    """Return a path without what ``torch.compile`` adds to it."""
    return ModulePath(path).without_compiler()
