"""A map from the eager model's sites to the values of one form of it, and its file.

``form.sites.json`` lies beside the artefact and serves where only the artefact is. It guarantees:
- a map of another artefact is refused, never used;
- each eager site is in ``sites`` or in ``missing``, and what could have been another value as well is in ``ambiguous``.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from torchtap.errors import FormError
from torchtap.sanitize import JSON_LIMIT, parse_json, read_file, shown

__all__ = ["FoundValue", "How", "SiteMap"]

How = Literal["equal", "near", "position"]
_FORMAT, _VERSION = "torchtap sites", 2


@final
@dataclass(frozen=True, slots=True)
class FoundValue:
    """Where in a form a site's value is, and what told it."""

    at: str
    how: How = "equal"
    order: int = 0  # its position among all values


@final
@dataclass(frozen=True)
class SiteMap:
    """Made by `torchtap.match`."""

    form: str  # a digest of the graph that it is for
    sites: dict[str, FoundValue]
    missing: dict[str, str] = field(default_factory=dict)  # site to the reason
    ambiguous: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # site to the values that are all equal to it
    classes: dict[str, str] = field(default_factory=dict)  # module path to the name of its class

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map, e.g. as ``form.sites.json`` beside the artefact."""
        Path(path).write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SiteMap:
        """Read a map that was saved."""
        try:
            read: Any = parse_json(read_file(path, JSON_LIMIT))
            if read.pop("format") != _FORMAT or read.pop("version") != _VERSION:
                raise ValueError("it is of another format or version")
            sites = {site: FoundValue(**found) for site, found in read.pop("sites").items()}
            ambiguous = {site: tuple(keys) for site, keys in read.pop("ambiguous").items()}
            return cls(sites=sites, ambiguous=ambiguous, **read)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormError(
                f"{os.fspath(path)} is no map of sites: {shown(str(error))}; "
                "tt.match(form, model, inputs).save(path) writes one"
            ) from error

    def check(self, form: str) -> None:
        """Refuse a form that the map was not made for."""
        if form != self.form:
            raise FormError(
                "this map of sites was made for another artefact: its graph is not the same; make one for this form "
                "with tt.match(form, model, inputs)"
            )

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} of {len(self.sites) + len(self.missing)} sites"]
        lines += [
            f"  {shown(site)}: equal values at {shown(', '.join(keys))}"
            for site, keys in self.ambiguous.items()
        ]
        lines += [f"  {shown(site)}: {shown(reason)}" for site, reason in self.missing.items()]
        return "\n".join(lines)
