"""``torchtap show`` for a folder of layer files: one line for each layer, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

from torchtap.cli.console import Terminal, say_json

__all__ = ["has_layers", "show_layers"]


def has_layers(folder: str) -> bool:
    """Whether a folder holds layer files. Asked for everything that is shown, so it goes by names alone."""
    place = Path(folder)
    return (place / "embedding_output.pt").is_file() or any(place.glob("layer_*_output.pt"))


def show_layers(folder: str, *, as_json: bool, rows: int) -> None:
    """Print statistics of every layer."""
    from torchtap.monitors.layers import open_layers  # needs torch, which the command does not import

    layers = open_layers(folder)
    statistics = {f"layer_{n}": layers.statistics.get(f"layer_{n}", {}) for n in layers.numbers}
    if as_json:
        say_json({"path": folder, "metadata": layers.metadata, "statistics": statistics})
        return
    console = Terminal()
    console.print(_heading(folder, layers.metadata, len(layers)), highlight=False)
    for name, stat in list(statistics.items())[:rows]:
        wrong = stat.get("has_nan") or stat.get("has_inf")
        console.print(_line(name, stat), style="red" if wrong else "", highlight=False)
    if len(statistics) > rows:
        console.print(f"{len(statistics) - rows} further layers; --rows shows more", style="dim")
    further = len(layers.passes())
    if further:
        console.print(f"{further} further passes, each in a folder inside this one", style="dim")


def _heading(folder: str, metadata: dict[str, object], count: int) -> str:
    blocks = metadata.get("blocks")
    of = f" of {blocks} blocks" if blocks is not None else ""
    norm = metadata.get("final_norm")
    last = f"; the last is before the final norm {norm!r}" if norm else ""
    return f"{folder}: {count} layers{of}; layer_0 enters the first block{last}"


def _line(name: str, stat: dict[str, object]) -> str:
    mean, std = stat.get("mean", float("nan")), stat.get("std", float("nan"))
    return f"{name}: Mean={mean:.6f}, Std={std:.6f}, NaN={stat.get('has_nan')}, Inf={stat.get('has_inf')}"
