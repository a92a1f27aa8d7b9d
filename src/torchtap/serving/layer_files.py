"""Write the layers of each request of an engine as ``tt.record_layers`` does for passes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchtap.errors import OutputError, PlanError
from torchtap.monitors.layers import write_layers
from torchtap.serving.engine_capture import capture
from torchtap.serving.values import ServedValues
from torchtap.spi import Name

__all__ = ["record_engine_layers"]


@contextmanager
def record_engine_layers(
    engine: Any, out_dir: str | Path | None, layers: Sequence[int | str] | None, *, enabled: bool
) -> Iterator[ServedValues]:
    """Record embedding and layers of each request: ``out_dir/<request>/embedding_output.pt``, ``layer_N_output.pt``.

    Layer N is the output of the N-th block, one row for each token. Called by ``tt.record_layers(engine, out_dir)``.
    """
    folder = None if out_dir is None else Path(out_dir)
    if folder is not None and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"{folder} already holds files: give a new folder")
    for each in layers or ():
        if each != "embedding" and not isinstance(each, int):
            raise PlanError(f"layers={each!r}: for an engine, give numbers of blocks and 'embedding'")
    sites = [
        "**.embed_tokens:output" if each == "embedding" else f"**.layers.{each}:output"
        for each in (["embedding", "*"] if layers is None else layers)
    ]
    if not enabled:
        yield ServedValues()
        return
    with capture(engine, *sites) as seen:
        yield seen
    for name in () if folder is None else seen.requests:
        values = seen.of_request(name)
        parts = {site: Name.parse(site).module.parts[-1] for site in values}
        numbers = {site: int(part) + 1 if part.isdecimal() else 0 for site, part in parts.items()}
        metadata = {
            "request": name,
            "layers": sum(number > 0 for number in numbers.values()),
            "sites": {f"layer_{number}": site for site, number in numbers.items()},
            "tokens": values.tokens,
            "positions": values.positions,
            "prompt": len(values.request.prompt),
            "missing": {str(position): why for position, why in values.missing.items()},
        }
        assert folder is not None
        own = folder / quote(values.request.label, safe="")
        if own.exists():  # an id that was used twice
            own = folder / quote(name, safe="")
        write_layers(own, {number: values[site] for site, number in numbers.items()}, metadata)
