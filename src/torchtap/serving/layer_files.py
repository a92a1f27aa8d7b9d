"""Write the layers of each request of an engine as ``tt.record_layers`` does for passes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from torchtap.errors import OutputError, PlanError
from torchtap.monitors.layers import write_layers
from torchtap.serving.engine_capture import capture
from torchtap.serving.values import ServedValues
from torchtap.spi import Name

__all__ = ["EngineLayers"]


@final
class EngineLayers:
    """Record embedding and layers of each request: ``out_dir/<request>/embedding_output.pt``, ``layer_N_output.pt``.

    Layer N is the output of the N-th block, one row for each token. Made by ``tt.record_layers(engine, out_dir)``.
    """

    def __init__(
        self, engine: Any, out_dir: str | Path | None, layers: Sequence[int | str] | None, *, enabled: bool
    ) -> None:
        self.out_dir = None if out_dir is None else Path(out_dir)
        if self.out_dir is not None and self.out_dir.is_dir() and any(self.out_dir.iterdir()):
            raise OutputError(f"{self.out_dir} already holds files: give a new folder")
        for each in layers or ():
            if each != "embedding" and not isinstance(each, int):
                raise PlanError(f"layers={each!r}: for an engine, give numbers of blocks and 'embedding'")
        sites = [
            "**.embed_tokens:output" if each == "embedding" else f"**.layers.{each}:output"
            for each in (["embedding", "*"] if layers is None else layers)
        ]
        self._enabled = enabled
        self._capture = capture(engine, *sites)

    def __enter__(self) -> ServedValues:
        return self._capture.__enter__() if self._enabled else self._capture.seen

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(*error)
        if self.out_dir is None or not self._enabled:
            return
        seen = self._capture.seen
        for name in seen.requests:
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
            folder = self.out_dir / quote(values.request.label, safe="")
            if folder.exists():  # an id that was used twice
                folder = self.out_dir / quote(name, safe="")
            write_layers(folder, {number: values[site] for site, number in numbers.items()}, metadata)
