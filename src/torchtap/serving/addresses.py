"""Give each row of packed values its address: request, position, prompt or generated.

An engine packs the tokens of many requests into one pass. A `PassTable` has the address of every row of a pass, read
from the engine. A `RowLog` collects the rows of all passes, and `RowLog.of_request` puts those of one request into
token order. It guarantees:
- one row for each position: if a position was computed again (preemption, a rejected draft), the row of the token that
  the request has in the end, and of these the latest;
- a position that was served from a prefix cache has the row of the request that computed it, if that has the same
  tokens up to there; ``computed_by`` names it;
- a position without a row is in ``missing``, with the reason.

Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchtap.errors import SelectionError

__all__ = ["PassTable", "Rejected", "Request", "RequestTokens", "RowLog", "audit", "matching"]


@final
@dataclass(frozen=True)
class PassTable:
    """The address of each row of one pass.

    shape: the leading dimensions of a value with one row for each token.
    requests, counts: the requests of the pass, and the number of rows of each, in the order of the rows.
    positions, tokens: of each row.
    index: where the rows are in the flattened value; None if they are its first rows, in order.
    """

    shape: tuple[int, ...]
    requests: tuple[str, ...]
    counts: tuple[int, ...]
    positions: Tensor
    tokens: Tensor
    index: Tensor | None = None

    def rows(self, value: Tensor) -> Tensor | None:
        """Return a copy of the rows of a value; None if it does not have one row for each token."""
        if tuple(value.shape[: len(self.shape)]) != self.shape:
            return None
        flat = value.detach().flatten(0, len(self.shape) - 1)
        if self.index is None:
            return flat[: len(self.positions)].to("cpu", copy=True)
        return flat.index_select(0, self.index.to(flat.device)).cpu()

    def runs(self) -> Iterator[tuple[str, slice]]:
        """Yield each request with its rows."""
        start = 0
        for request, count in zip(self.requests, self.counts, strict=True):
            yield request, slice(start, start + count)
            start += count

    def only(self, chosen: Mapping[str, Sequence[int]]) -> PassTable:
        """Return the table of some rows: for each request, the numbers of those to keep among its own."""
        kept = {request: [run.start + row for row in chosen[request]] for request, run in self.runs()
                if chosen.get(request)}  # fmt: skip
        at = torch.tensor([row for rows in kept.values() for row in rows], dtype=torch.long)
        return PassTable(
            self.shape,
            tuple(kept),
            tuple(map(len, kept.values())),
            self.positions[at],
            self.tokens[at],
            at if self.index is None else self.index[at],
        )


def audit(table: PassTable, requests: Mapping[str, Request]) -> str:
    """Return why a table cannot be right; "" if nothing speaks against it.

    The positions of a request must be consecutive, and tokens of a prompt must be those of the request.
    """
    for name, run in table.runs():
        positions, tokens = table.positions[run].tolist(), table.tokens[run].tolist()
        if name not in requests:
            return f"request {name!r} was scheduled without having been announced"
        if not positions:
            continue
        if positions != list(range(positions[0], positions[0] + len(positions))):
            return f"the positions of request {name!r} are not consecutive: {positions[:8]}"
        known = requests[name].prompt[positions[0] : positions[0] + len(positions)]
        if tokens[0] >= 0 and tokens[: len(known)] != known:
            return f"request {name!r} has other tokens than its prompt from position {positions[0]}"
    return ""


@final
@dataclass
class Request:
    """A request as its engine knows it. ``scope`` is what else decides its values, such as an adapter."""

    id: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    finished: bool = False
    scope: str = ""
    parent: str | None = None  # the user's id of this request, if it differs
    sample: int | None = None  # of a request with several outputs
    logprobs: list[float] | None = None  # of the output, as the engine sampled it
    asked: dict[str, Any] = field(default_factory=dict)  # of torchtap, by a request to a server

    @property
    def tokens(self) -> list[int]:
        """The prompt and the output."""
        return self.prompt + self.output

    @property
    def label(self) -> str:
        """The user's id, with the number of the sample if there are several."""
        return (self.parent or self.id) + ("" if self.sample is None else f"_{self.sample}")

    def is_called(self, name: str) -> bool:
        """Return True if this is the engine's id or the user's. Servers number the prompts of a call: ``cmpl-1-0``."""
        if name in (self.id, self.parent):
            return True
        call, _, number = (self.parent or "").rpartition("-")
        return call == name and number.isdecimal()


def matching(requests: Mapping[str, Request], request: str, sample: int | None) -> Request:
    """Return the request with an id, of the engine or of the user."""
    found = [each for each in requests.values() if each.is_called(request)]
    if sample is not None:
        found = [each for each in found if each.sample == sample]
    exact = [each for each in found if each.id == request]
    if len(exact or found) == 1:
        return (exact or found)[0]
    known = [each.parent or each.id for each in requests.values()]
    if not found:
        near = get_close_matches(request, known, 3) or list(dict.fromkeys(known))[:5]
        raise SelectionError(
            f"request {request!r}{'' if sample is None else f', sample {sample}'} is not among the "
            f"{len(known)} recorded ones" + (f"; some are {', '.join(map(repr, near))}" if near else ""),
            nearest=tuple(near),
        )
    listed = ", ".join(f"{each.id!r} (sample {each.sample})" for each in found[:6])
    raise SelectionError(
        f"request {request!r} has {len(found)} recordings: {listed}; give sample=, or one of these ids"
    )


class Rejected(NamedTuple):
    """A drafted token that was computed and not accepted."""

    position: int
    token: int
    values: dict[str, Tensor]


class _Row(NamedTuple):
    number: int  # of the pass
    offset: int  # among the rows of the pass
    token: int


@final
@dataclass(eq=False, repr=False)
class RequestTokens(Mapping[str, Tensor]):
    """The values of one request in token order: site → tensor with one row for each of ``positions``.

    tokens: all tokens of the request, prompt and output. The last one was sampled and never computed.
    generated: for each row, True if its token was generated.
    computed_by: for each row, the request that computed it: another one for positions from a prefix cache.
    rejected: drafted tokens that were computed and not accepted.
    missing: positions without a row, and why.
    logprobs: of the generated tokens, if the engine returned them.
    """

    request: Request
    positions: list[int]
    _rows: dict[str, Tensor]
    computed_by: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens
        self.logprobs = self.request.logprobs
        start = len(self.request.prompt)
        self.generated = torch.tensor([each >= start for each in self.positions], dtype=torch.bool)

    def __getitem__(self, site: str) -> Tensor:
        if site in self._rows:
            return self._rows[site]
        leaves = [name for name in self._rows if name.startswith(f"{site}.")]
        if len(leaves) == 1:
            return self._rows[leaves[0]]
        nearest = get_close_matches(site, self._rows, 3, 0.5) or list(self._rows)[:3]
        raise SelectionError(
            f"{site!r} was not recorded for request {self.request.id!r}; recorded are {', '.join(map(repr, nearest))}"
            + (" …" if len(self._rows) > len(nearest) else ""),
            nearest=tuple(nearest),
        )

    def __contains__(self, site: object) -> bool:
        return site in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        first = (
            f"RequestTokens({self.request.id!r}: {len(self.positions)} rows, {int(self.generated.sum())} of generated "
            f"tokens, {len(self.missing)} missing, {len(self.rejected)} rejected)"
        )
        return "\n".join([first, *(f"  {site}  {list(value.shape)}" for site, value in self.items())])


@final
class RowLog:
    """The rows of all passes, and the requests they belong to."""

    def __init__(self) -> None:
        self.tables: list[PassTable] = []
        self.requests: dict[str, Request] = {}
        self.values: dict[str, dict[int, Tensor]] = {}  # site -> number of the pass -> rows
        self.problems: dict[str, str] = {}  # site, or "" for all -> why values are missing
        self._rows: dict[str, dict[int, list[_Row]]] = {}
        self._indexed = 0
        self._prefixes: dict[bytes, tuple[str, _Row]] | None = None

    def add(self, table: PassTable) -> int:
        """Start a pass; return its number."""
        self.tables.append(table)
        self._prefixes = None
        return len(self.tables) - 1

    def put(self, number: int, site: str, rows: Tensor) -> None:
        """Keep the rows of a site in a pass."""
        self.values.setdefault(site, {})[number] = rows

    def of_request(self, request: str, sample: int | None = None) -> RequestTokens:
        """Return the values of one request in token order."""
        known = matching(self.requests, request, sample)
        chosen, rejected = self._settled(known)
        found = {position: (known.id, row) for position, row in chosen.items()}
        missing: dict[int, str] = {}
        computable = len(known.tokens) - bool(known.output)
        absent = [position for position in range(computable) if position not in found]
        keys = list(_prefix_keys(known)) if absent else []
        for position in absent:
            donor = self._donors().get(keys[position])
            if donor is None:
                missing[position] = _why(known, position, found)
            else:
                found[position] = donor
        order = sorted(found)
        rows = [found[position][1] for position in order]
        values = {
            site: torch.stack([passes[row.number][row.offset] for row in rows])
            for site, passes in self.values.items()
            if rows and all(row.number in passes for row in rows)
        }
        drafts = [
            Rejected(position, row.token, {
                site: passes[row.number][row.offset] for site, passes in self.values.items() if row.number in passes
            })
            for position, row in rejected
        ]  # fmt: skip
        return RequestTokens(known, order, values, [found[each][0] for each in order], drafts, missing)

    def forget(self, request: str) -> None:
        """Release the rows of a request. A pass is released with its last request."""
        self._index()
        self.requests.pop(request, None)
        self._prefixes = None
        for number in {row.number for rows in self._rows.pop(request, {}).values() for row in rows}:
            if not any(name in self.requests for name in self.tables[number].requests):
                for passes in self.values.values():
                    passes.pop(number, None)
                self.tables[number] = _EMPTY

    def _settled(self, request: Request) -> tuple[dict[int, _Row], list[tuple[int, _Row]]]:
        """Return the row of each position, and the rows of drafts that were not accepted."""
        self._index()
        tokens = request.tokens
        chosen: dict[int, _Row] = {}
        rejected = []
        for position, rows in sorted(self._rows.get(request.id, {}).items()):
            for row in rows:
                known = position < len(tokens)
                if (known and tokens[position] == row.token) or (
                    not known and not request.finished and not request.output
                ):
                    chosen[position] = row
                else:
                    rejected.append((position, row))
        return chosen, rejected

    def _index(self) -> None:
        """Sort the rows that came since the last call by request and position."""
        for number in range(self._indexed, len(self.tables)):
            table = self.tables[number]
            positions, tokens = table.positions.tolist(), table.tokens.tolist()
            for request, run in table.runs():
                rows = self._rows.setdefault(request, {})
                for offset in range(run.start, run.stop):
                    rows.setdefault(positions[offset], []).append(_Row(number, offset, tokens[offset]))
        self._indexed = len(self.tables)

    def _donors(self) -> dict[bytes, tuple[str, _Row]]:
        """Return a row for each sequence of tokens that any request computed."""
        if self._prefixes is None:
            self._prefixes = {}
            for request in self.requests.values():
                chosen = self._settled(request)[0]
                for position, key in enumerate(_prefix_keys(request)):
                    if position in chosen:
                        self._prefixes.setdefault(key, (request.id, chosen[position]))
        return self._prefixes


_EMPTY = PassTable((0,), (), (), torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))


def _prefix_keys(request: Request) -> Iterator[bytes]:
    """Yield a key for each position, equal for requests with the same tokens up to there and the same scope."""
    key = request.scope.encode()
    for token in request.tokens:
        key = blake2b(key + token.to_bytes(8, "little", signed=True), digest_size=16).digest()
        yield key


def _why(request: Request, position: int, found: Mapping[int, Any]) -> str:
    if any(each > position for each in found):
        return (
            "not computed for this request (a prefix cache had it), nor recorded for one with the same tokens"
        )
    if request.finished:
        return "the request ended before it was computed"
    return "not computed yet"
