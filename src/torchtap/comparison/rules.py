"""Rules that a user gives for bringing two recordings together: names, and how values are laid out.

A rule in text is ``reference name=target name``, where each ``*`` on the left stands for any text and the ``*``
on the right for the same text again, then any number of changes to a side's value:

    transformer.wte=tok                         a module, with everything inside it, under another name
    model.*=*                                   the target has no leading "model."
    *.attn:output=*.attention:output            another name
    *.attn:output=*; target.permute=0,2,1,3     the target keeps heads before tokens
    *=*; target.slice=:,:100                    the target is padded beyond 100 tokens
    *=*; reference.slice=:4                     the target ran on the first 4 samples alone
    *.qkv:output=*; target.reshape=2,16,-1      the same elements in another shape

Changes are applied in the order in which they are written. Not here: which sites pair up (`align`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from torchtap.errors import CompareError
from torchtap.plan.names import path_and_rest, path_parts, paths_around

__all__ = ["Change", "PairingRule", "Side", "parse_rule", "rule_from"]

Side = Literal["reference", "target"]
Array: TypeAlias = np.ndarray
_SLICE = re.compile(r"\s*(-?\d*)\s*(?::\s*(-?\d*)\s*(?::\s*(-?\d*)\s*)?)?$")


@final
@dataclass(frozen=True, slots=True)
class Change:
    """One change to a side's value before it is compared."""

    side: Side
    action: str
    text: str

    def apply(self, value: Array) -> Array:
        """The value as it is to be compared: a view wherever there is one."""
        try:
            return _ACTIONS[self.action](value, self.text)
        except (ValueError, IndexError, TypeError) as error:
            raise CompareError(
                f"{self.side}.{self.action}={self.text} does not fit a value of shape {tuple(value.shape)}: {error}"
            ) from error


@final
@dataclass(frozen=True, slots=True)
class PairingRule:
    """A reference name pattern, the target's name for it, and changes to the values."""

    left: str
    right: str
    changes: tuple[Change, ...] = ()

    def rename(self, reference: str) -> str | None:
        """What the target calls the reference's ``reference``; ``None`` when the rule is not about it."""
        whole = self._renamed(reference)
        if whole is not None or ":" in self.left:
            return whole
        # A module's path stands for the module and for everything inside it.
        path, rest = path_and_rest(reference)
        for outer in [path, *paths_around(path)][: max(1, len(path_parts(path)))]:  # not the model's own
            renamed = self._renamed(outer)
            if renamed is not None:
                return renamed + path.removeprefix(outer) + rest
        return None

    def _renamed(self, text: str) -> str | None:
        match = re.fullmatch("(.*)".join(re.escape(part) for part in self.left.split("*")), text)
        if match is None:
            return None
        parts = self.right.split("*")
        stars = match.groups()
        if len(parts) - 1 != len(stars):
            # "*.attn:output=*" keeps the whole name: a lone star on the right stands for all that was matched.
            return text
        return parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=True))

    def apply(self, side: Side, value: Array) -> Array:
        """Carry out this rule's changes for one side."""
        for change in self.changes:
            if change.side == side:
                value = change.apply(value)
        return value

    def __str__(self) -> str:
        return "; ".join(
            [f"{self.left}={self.right}", *(f"{c.side}.{c.action}={c.text}" for c in self.changes)]
        )


def parse_rule(text: str) -> PairingRule:
    """Read a rule from text."""
    head, *tail = (part.strip() for part in text.split(";"))
    left, equals, right = head.partition("=")
    left, right = left.strip(), right.strip()
    if not equals or not left or not right:
        raise CompareError(f"rule {text!r} is not 'reference name=target name'; for example 'model.*=*'")
    if left.count("*") != right.count("*") and right != "*":
        raise CompareError(
            f"rule {text!r} has {left.count('*')} stars on the left and {right.count('*')} on the right; "
            "each star on the right repeats what the one on the left stands for"
        )
    return PairingRule(left, right, tuple(_parse_change(part, text) for part in tail if part))


def rule_from(given: str | PairingRule) -> PairingRule:
    """A rule, from text or as it is."""
    return given if isinstance(given, PairingRule) else parse_rule(given)


def _parse_change(part: str, text: str) -> Change:
    name, equals, value = part.partition("=")
    side, _, action = name.strip().partition(".")
    if not equals or side not in ("reference", "target") or action not in _ACTIONS:
        known = ", ".join(sorted(_ACTIONS))
        raise CompareError(
            f"{part!r} in rule {text!r} is not a change; write reference.ACTION=... or target.ACTION=... "
            f"with one of: {known}"
        )
    return Change("reference" if side == "reference" else "target", action, value.strip())


def _permute(value: Array, text: str) -> Array:
    return value.transpose([int(axis) for axis in text.split(",")])


def _reshape(value: Array, text: str) -> Array:
    return value.reshape([int(size) for size in text.split(",")])


def _slice(value: Array, text: str) -> Array:
    index: list[slice | int] = []
    for part in text.strip("[] ").split(","):
        match = _SLICE.match(part)
        if match is None or not part.strip():
            raise ValueError(f"{part!r} is not a slice")
        if ":" not in part:
            index.append(int(part))
            continue
        numbers = [int(group) if group else None for group in match.groups()]
        index.append(slice(*numbers))
    return np.asarray(value[tuple(index)])


def _squeeze(value: Array, text: str) -> Array:
    axis = int(text)
    return value.squeeze(axis) if value.shape[axis] == 1 else value


def _unsqueeze(value: Array, text: str) -> Array:
    return np.expand_dims(value, int(text))


_ACTIONS: dict[str, Callable[[Array, str], Array]] = {
    "permute": _permute,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
}
