"""One file for each layer: ``embedding_output.pt``, ``layer_N_output.pt``, ``statistics.pt``, ``metadata.pt``.

Every file can be loaded with ``torch.load(..., weights_only=True)``. Layer 0 is the embedding, layer N the N-th
block, also where not all of them were recorded. Further passes (decode steps, further batches) have folders of their
own beside the first one's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final, overload

import torch
from torch import Tensor

from torchtap.comparison.recordings import FolderRecording, LayerChange, layer_changes, load_tensor
from torchtap.errors import RunCorruptError, SelectionError
from torchtap.plan.names import site_name

__all__ = ["Layers", "layer_statistics", "open_layers", "write_layers"]


def layer_statistics(value: Tensor) -> dict[str, Any]:
    """What ``statistics.pt`` says of one layer."""
    wide = value.detach().to(torch.float32) if value.dtype.itemsize < 4 else value.detach()
    finite = wide[torch.isfinite(wide)] if wide.is_floating_point() else wide.to(torch.float64)
    some = finite.numel() > 0
    return {
        "mean": float(finite.mean()) if some else float("nan"),
        "std": float(finite.std()) if finite.numel() > 1 else float("nan"),
        "min": float(finite.min()) if some else float("nan"),
        "max": float(finite.max()) if some else float("nan"),
        "absmax": float(finite.abs().max()) if some else float("nan"),
        "has_nan": bool(torch.isnan(wide).any()),
        "has_inf": bool(torch.isinf(wide).any()),
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }


def write_layers(folder: Path, layers: Mapping[int, Tensor], metadata: dict[str, object]) -> None:
    """Write one pass: the layers by their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in layers.items():
        name = "embedding_output.pt" if number == 0 else f"layer_{number}_output.pt"
        torch.save(value.detach().contiguous().clone(), folder / name)
    statistics = {f"layer_{number}": layer_statistics(value) for number, value in layers.items()}
    torch.save(statistics, folder / "statistics.pt")
    torch.save(metadata, folder / "metadata.pt")


def open_layers(folder: str | Path) -> Layers:
    """Open a folder of layer files: ``layers[30]``, ``layers.statistics["layer_30"]``, ``layers.changes()``."""
    return Layers(folder)


@final
class Layers(Sequence[Tensor]):
    """The layers of one recorded pass, by number. A layer is read when it is asked for.

    Where only some layers were recorded, ``numbers`` says which; ``layers[-1]`` is the last of them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._recording = FolderRecording(folder)
        self.numbers = self._recording.numbers()

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            wanted = range(*index.indices(self.numbers[-1] + 1))
            return [self[number] for number in wanted if number in self.numbers]
        if -len(self) <= index < 0:
            index = self.numbers[index]
        if index not in self.numbers:
            if not 0 <= index <= self.numbers[-1]:
                raise IndexError(index)
            raise SelectionError(f"{self.folder} has no layer {index}; it has {list(self.numbers)}")
        return load_tensor(self._recording.file(site_name(f"layer_{index}", "output")))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in self.numbers)

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Statistics of each layer, from the file or, where there is none, from the layers themselves."""
        path = self.folder / "statistics.pt"
        if path.is_file():
            loaded: dict[str, dict[str, Any]] = self._load(path)
            return loaded
        return {f"layer_{number}": layer_statistics(self[number]) for number in self.numbers}

    @property
    def metadata(self) -> dict[str, Any]:
        """What the recording said of itself; empty when it said nothing."""
        path = self.folder / "metadata.pt"
        return self._load(path) if path.is_file() else {}

    def changes(self) -> list[LayerChange]:
        """How much each layer changes what it is given."""
        return layer_changes(self._recording)

    def passes(self) -> list[Path]:
        """The folders of further passes, in order."""
        return sorted(
            path for path in self.folder.iterdir() if path.is_dir() and (path / "metadata.pt").is_file()
        )

    def _load(self, path: Path) -> Any:
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:
            raise RunCorruptError(f"{path} cannot be read: {type(error).__name__}") from error
