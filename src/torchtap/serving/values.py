"""What was recorded inside an engine, in memory or in a folder: ``seen.of_request(id)``, ``run.tokens(id)``.

A folder has one safetensors file for each request: a tensor for each site, and tokens, positions and the rest as JSON
in the file's metadata. Files appear whole or not at all, so a folder can be read while a server writes to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from torchtap.errors import OutputError, RunNotFoundError, SessionError
from torchtap.sanitize import parse_json, read_file
from torchtap.serving.addresses import Rejected, Request, RequestTokens, RowLog, matching
from torchtap.spi import SharedFolder

__all__ = ["ServedRun", "ServedValues", "open_run", "write_request"]

_KEY = "torchtap"
_FORMAT = 1
_REJECTED = "rejected/"
_PROBLEMS = "problems.json"


@final
class ServedValues:
    """Made by `torchtap.serving.capture`: the values of each request, once the block is left."""

    def __init__(self) -> None:
        self._source: RowLog | ServedRun | None = None
        self._logprobs: dict[str, list[float]] = {}

    def fill(self, source: RowLog | ServedRun) -> None:
        """Receive what was recorded. Requests of which no row was computed meanwhile are left out."""
        if isinstance(source, RowLog):
            computed = {request for table in source.tables for request in table.requests}
            source.requests = {name: each for name, each in source.requests.items() if name in computed}
        self._source = source

    @property
    def _recorded(self) -> RowLog | ServedRun:
        if self._source is None:
            raise SessionError(
                "the values of requests are known when the capture is left: ask after the block"
            )
        return self._source

    @property
    def log(self) -> RowLog:
        """The rows as they were packed, pass by pass."""
        if isinstance(self._recorded, ServedRun):
            raise SessionError("packed rows stay in the engine's worker process: use of_request(id)")
        return self._recorded

    @property
    def requests(self) -> list[str]:
        """The ids of the engine, in the order in which requests were scheduled."""
        return list(self._recorded.requests)

    @property
    def problems(self) -> dict[str, str]:
        """Sites that could not be taken, and why; under "" what concerns whole passes."""
        return dict(self._recorded.problems)

    def of_request(self, request: str, sample: int | None = None) -> RequestTokens:
        """Return the values of one request in token order.

        request: its id, the engine's or your own.
        sample: which of several outputs (``n > 1``).

        Raises `SelectionError` if the id is unknown, or has several outputs and no ``sample`` is given.
        """
        found = self._recorded.of_request(request, sample)
        found.logprobs = self._logprobs.get(found.request.id, found.logprobs)
        return found

    tokens = of_request

    def add_outputs(self, outputs: Iterable[Any]) -> None:
        """Add the log-probabilities of vLLM's ``RequestOutput`` objects (``SamplingParams(logprobs=0)``)."""
        for each in outputs:
            for made in each.outputs:
                if made.logprobs:
                    several = made.index if len(each.outputs) > 1 else None
                    chosen = zip(made.logprobs, made.token_ids, strict=True)
                    name = self.of_request(each.request_id, several).request.id
                    self._logprobs[name] = [float(step[token].logprob) for step, token in chosen]

    def save(self, folder: str | os.PathLike[str]) -> ServedRun:
        """Write every request to a folder and open it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in self.requests:
            write_request(Path(folder), self.of_request(name))
        if self.problems:
            SharedFolder(Path(folder)).put(_PROBLEMS, [json.dumps(self.problems).encode()])
        return open_run(folder)


def write_request(folder: Path, values: RequestTokens, sites: Collection[str] | None = None) -> None:
    """Write one request to a folder, with some of its sites or all."""
    from safetensors.torch import save

    tensors = {site: rows.contiguous() for site, rows in values.items() if sites is None or site in sites}
    meta = {
        "format": _FORMAT,
        "request": asdict(values.request),
        "sites": list(tensors),
        "positions": values.positions,
        "computed_by": values.computed_by,
        "missing": {str(position): why for position, why in values.missing.items()},
        "rejected": [[each.position, each.token] for each in values.rejected],
    }
    for number, each in enumerate(values.rejected):
        tensors.update({f"{_REJECTED}{number}/{site}": row.contiguous() for site, row in each.values.items()})
    path = folder / _file_name(values.request.id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        SharedFolder(folder).put(path.name, [save(tensors, {_KEY: json.dumps(meta)})])
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}") from error


def _file_name(request: str) -> str:
    name = quote(request, safe="")
    if len(name) > 150:
        name = name[:100] + blake2b(request.encode(), digest_size=16).hexdigest()
    return f"{name}.safetensors"


def read_request(path: Path) -> RequestTokens:
    """Read the file of one request."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        meta = parse_json(file.metadata()[_KEY])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rejected = [
        Rejected(position, token, {
            name.removeprefix(f"{_REJECTED}{number}/"): value
            for name, value in values.items() if name.startswith(f"{_REJECTED}{number}/")
        })
        for number, (position, token) in enumerate(meta["rejected"])
    ]  # fmt: skip
    return RequestTokens(
        Request(**meta["request"]),
        meta["positions"],
        {name: values[name] for name in meta["sites"]},
        computed_by=meta["computed_by"],
        rejected=rejected,
        missing={int(position): why for position, why in meta["missing"].items()},
    )


@final
class ServedRun:
    """A folder of recorded requests; made by `open_run`. It may still grow."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise RunNotFoundError(f"{self.folder} is no folder of recorded requests")

    def _known(self) -> dict[str, Request]:
        from safetensors import safe_open

        known = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                request = Request(**parse_json(file.metadata()[_KEY])["request"])
            known[request.id] = request
        return known

    @property
    def problems(self) -> dict[str, str]:
        """Sites that could not be taken, and why."""
        path = self.folder / _PROBLEMS
        return dict(parse_json(read_file(path))) if path.exists() else {}

    @property
    def requests(self) -> list[str]:
        """The ids of the requests."""
        return list(self._known())

    def tokens(self, request: str, sample: int | None = None) -> RequestTokens:
        """Return the values of one request in token order, prompt and generated."""
        return read_request(self.folder / _file_name(matching(self._known(), request, sample).id))

    of_request = tokens


def open_run(folder: str | os.PathLike[str]) -> ServedRun:
    """Open a folder that `ServedValues.save` or a server wrote."""
    return ServedRun(folder)
