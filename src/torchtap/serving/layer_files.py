"""Write the layers of each request of an engine as ``tt.record_layers`` does for passes of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from torchtap.errors import OutputError
from torchtap.monitors.layers import write_layers
from torchtap.serving.engine_capture import EngineCapture, capture
from torchtap.serving.values import ServedValues
from torchtap.spi import Name

__all__ = ["EngineLayers"]


@final
class EngineLayers:
    """Record embedding and layers of each request: ``out_dir/<request>/embedding_output.pt``, ``layer_N_output.pt``.

    Layer N is the output of the N-th block, one row for each token. Made by ``tt.record_layers(engine, out_dir)``.
    """

    def __init__(self, engine: Any, out_dir: str | Path | None) -> None:
        self.out_dir = None if out_dir is None else Path(out_dir)
        if self.out_dir is not None and self.out_dir.is_dir() and any(self.out_dir.iterdir()):
            raise OutputError(f"{self.out_dir} already holds files: give a new folder")
        self._capture: EngineCapture = capture(engine, "**.embed_tokens:output", "**.layers.*:output")
        self.seen: ServedValues = self._capture.seen

    def __enter__(self) -> ServedValues:
        return self._capture.__enter__()

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(*error)
        if self.out_dir is None:
            return
        for name in self.seen.requests:
            values = self.seen.of_request(name)
            embedding = [site for site in values if "embed_tokens" in site]
            blocks = [site for site in values if "embed_tokens" not in site]
            numbers = [
                *range(len(embedding[:1])),
                *(int(Name.parse(each).module.parts[-1]) + 1 for each in blocks),
            ]
            sites = dict(zip(numbers, [*embedding[:1], *blocks], strict=True))
            metadata = {
                "request": name,
                "layers": len(blocks),
                "sites": {f"layer_{number}": site for number, site in sites.items()},
                "tokens": values.tokens,
                "positions": values.positions,
                "prompt": len(values.request.prompt),
                "missing": {str(position): why for position, why in values.missing.items()},
            }
            write_layers(
                self.out_dir / quote(name, safe=""), {n: values[s] for n, s in sites.items()}, metadata
            )
