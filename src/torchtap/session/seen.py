"""What one look inside a model brought: a read-only mapping from site names to what was kept there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from torchtap.errors import ReductionError, SelectionError
from torchtap.plan.names import belongs_to, first_part, is_unplaced, read_name, site_name
from torchtap.plan.sites import input_names, unwrap
from torchtap.receive.collect import result_of
from torchtap.receive.entries import Entry
from torchtap.receive.receiver import Receiver
from torchtap.sanitize import shown

if TYPE_CHECKING:
    from torchtap.session.coverage import Missing

__all__ = ["Seen"]


@final
class Seen(Mapping[str, Any]):
    """Site name → tensor, or the named results of another reduction; in the order of execution.

    A name may also be an alias, a further name of a shared module or tied parameter, or an input by position.
    """

    def __init__(self, receiver: Receiver, lost: list[str]) -> None:
        self.lost = lost  # what could not be kept, a sentence each; a strict capture raises instead
        self._receiver = receiver
        self._by_name: dict[str, Entry] = {}

    def __getitem__(self, name: str | nn.Module) -> Any:
        name = self._named(name)
        entry = self._find(name)
        if entry is None:
            from torchtap.plan.names import no_such_site

            reason = self._why_not(name)
            raise no_such_site(name, list(self), "the captured", reason)
        if self._is_lost(entry):
            reasons = ", ".join(self._losses(entry))
            raise SelectionError(f"{name!r} came, but nothing of it could be kept: {reasons}")
        return self._result(entry)

    def _named(self, name: str | nn.Module) -> str:
        """A module of the model stands for its output."""
        if not isinstance(name, nn.Module):
            return name
        path = self._receiver.path_of(unwrap(name))
        if path is None:
            raise SelectionError(
                f"this {type(name).__name__} is not a module of the model that was looked into"
            )
        return site_name(path, "output")

    def __contains__(self, name: object) -> bool:
        if isinstance(name, nn.Module):
            path = self._receiver.path_of(unwrap(name))
            name = None if path is None else site_name(path, "output")
        entry = self._find(name) if isinstance(name, str) else None
        return entry is not None and not self._is_lost(entry)

    def get(self, name: str | nn.Module, default: object = None) -> Any:
        entry = self._find(self._named(name))
        return default if entry is None or self._is_lost(entry) else self._result(entry)

    def _losses(self, entry: Entry) -> list[str]:
        return [message for message in self.lost if message.startswith(f"{entry.name}: ")]

    def _is_lost(self, entry: Entry) -> bool:
        """Whether a value came of which nothing could be kept. Of one reduction of several there may be something."""
        if not self._losses(entry):
            return False
        result = self._result(entry)
        return isinstance(result, dict) and not result

    def _result(self, entry: Entry) -> Any:
        try:
            return result_of(self._receiver.folding, entry)
        except ReductionError as error:
            raise ReductionError(f"{entry.name}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._came())

    def _came(self) -> Iterator[Entry]:
        for entry in self._receiver.entries:
            if entry.shape is not None and not self._is_lost(entry):
                yield entry

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def coverage(self) -> list[Missing]:
        """What was asked for and did not come, and why."""
        from torchtap.session.coverage import missing_sites

        return missing_sites(self._receiver, frozenset(range(len(self._receiver.plan.taps))))

    def _repr_html_(self) -> str:
        from torchtap.display import drawn

        return str(drawn("captured values", self))

    def __repr__(self) -> str:
        lines = [f"Seen({len(self)} sites)"]
        for entry in self._came():
            # Statistics that a compiled graph makes come without the value's own dtype.
            dtype = "" if entry.dtype is None else str(entry.dtype).removeprefix("torch.")
            # Two backward passes of one forward, for instance, are joined: what is given counts.
            shape = self._shape(entry)
            lines.append(f"  {entry.name}  {dtype}{list(shape)}")
        return shown("\n".join(lines), 100_000, lines=True)

    def _shape(self, entry: Entry) -> Sequence[int]:
        try:
            result = result_of(self._receiver.folding, entry)
        except ReductionError:  # it cannot be given any more
            return entry.shape or ()
        return result.shape if isinstance(result, Tensor) else entry.shape or ()

    def _find(self, name: str) -> Entry | None:
        entries = self._receiver.entries
        if len(self._by_name) != len(entries):
            self._by_name = {entry.name: entry for entry in entries}
        for spelling in self._spellings(name):
            entry = self._by_name.get(spelling)
            if entry is not None and entry.shape is not None:
                return entry
        return self._only_leaf(name)

    def _only_leaf(self, name: str) -> Entry | None:
        """A value that came inside a structure, such as ``(hidden, None)``, needs no leaf if it is alone."""
        asked = read_name(name)
        if asked.leaf or asked.call:
            return None
        found = [
            entry
            for entry in self._by_name.values()
            if (entry.site.path, entry.site.kind, entry.site.call) == (asked.path, asked.kind, 0)
            and entry.shape is not None
        ]
        return found[0] if len(found) == 1 and not is_unplaced(found[0].site.leaf) else None

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        plan = self._receiver.plan
        for table in (plan.aliases, plan.other_names):
            for other, first in table.items():
                if belongs_to(name, other):
                    yield first + name[len(other) :]
        yield str(read_name(name))
        yield from self._by_position(name)

    def _by_position(self, name: str) -> Iterator[str]:
        """``x:input.1`` for the second parameter, and ``x:output.0`` for an output that is one tensor."""
        path, kind, leaf, call = read_name(name)
        first, more = first_part(leaf)
        if not first.isdecimal():
            return
        if leaf == "0" and (self._receiver.knows_positions or not path):
            yield site_name(path, kind, "", call)
        if kind not in ("input", "grad_input"):
            return
        modules = [place.module for place in self._receiver.plan.places if place.path == path]
        for names in filter(None, map(input_names, modules)):
            if int(first) < len(names):
                named = names[int(first)]
                yield site_name(path, kind, f"{named}.{more}" if more else named, call)

    def _why_not(self, name: str) -> str:
        bare = read_name(name).bare
        leaves = [known for known in self if known.startswith(f"{bare}.")]
        if leaves:
            return f"That value has several leaves: {', '.join(leaves[:6])}."
        for missing in self.coverage():
            if missing.site == name:
                return f"It was asked for and did not come: {missing.reason}."
        forgets = self._receiver.forgets
        return f"The form may have forgotten it: {forgets}." if forgets else ""
