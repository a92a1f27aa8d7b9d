"""Things that can be compared, behind one face: where the sites are, in which order, and each one's value.

A recording hands out one value at a time and keeps none, so that comparing needs no more than two values'
memory. Sources: values in memory, a run folder, a folder of ``layer_N_output.pt`` files.

Nothing here needs torch, unless a value in memory is a tensor or a file is one that only torch can read.

Not here: making a recording of a live model (`live`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from torchtap.comparison.align.pairing import KnownSite
from torchtap.comparison.measure.dtypes import name_of
from torchtap.comparison.measure.streams import PIECE_BYTES, ValueStream, can_stream
from torchtap.comparison.measure.values import Comparable, Value, value_of
from torchtap.comparison.recorded.saved import SavedTensor, Unreadable, read_saved
from torchtap.errors import CompareError, RunCorruptError, RunNotFoundError
from torchtap.plan.names import (
    execution_order,
    in_passing_order,
    kind_of,
    passes_modules,
    path_of,
    read_name,
    site_name,
)
from torchtap.store.format.dtypes import BY_NAME

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = [
    "FolderRecording",
    "MemoryRecording",
    "Recording",
    "RunRecording",
    "is_layer_folder",
]

_LAYER_FILE = re.compile(r"layer_(\d+)_output\.pt$")
_EMBEDDING_FILE = "embedding_output.pt"
_PASSES = ("decode_", "pass_")
_CAUSES = {"optim_state": 1, "lr": 2, "update": 3}  # causes before effects, after all that a step computes
_STREAMED = 4 << 20  # bytes from which on a stored value is read piece by piece


class Recording(Protocol):
    """Sites with values, in order of execution."""

    @property
    def label(self) -> str:
        """What it is called in a report."""

    def steps(self) -> list[int]:
        """The steps that were recorded; one for a recording of a single pass."""

    def sites(self, step: int) -> list[KnownSite]:
        """The sites that have a value or statistics at a step, in order of execution."""

    def value(self, site: str, step: int) -> Value | None:
        """A site's value, or ``None`` when only statistics were kept. Raises when it is damaged."""

    def stream(self, site: str, step: int) -> ValueStream | None:
        """A large stored value piece by piece; ``None`` when it is small, or has to be read whole."""

    def statistics(self, name: str, step: int) -> dict[str, float]:
        """One statistic of every site that has it at a step."""

    def problems(self) -> list[str]:
        """What is odd about it, to be told."""

    def damage(self) -> list[str]:
        """What is known to be damaged or lost: with it, agreement of the rest proves nothing."""


@final
@dataclass(frozen=True, eq=False)
class MemoryRecording:
    """Values in memory, in the order of the mapping."""

    values: Mapping[str, Comparable]
    label: str = "values"
    notes: tuple[str, ...] = ()

    def steps(self) -> list[int]:
        return [0]

    def sites(self, step: int) -> list[KnownSite]:
        return [
            KnownSite(name, tuple(value.shape), name_of(value.dtype)) for name, value in self.values.items()
        ]

    def value(self, site: str, step: int) -> Value | None:
        return value_of(self.values[site])

    def stream(self, site: str, step: int) -> ValueStream | None:
        return None

    def statistics(self, name: str, step: int) -> dict[str, float]:
        return {}

    def problems(self) -> list[str]:
        return list(self.notes)

    def damage(self) -> list[str]:
        return []


@final
class FolderRecording:
    """A folder of ``embedding_output.pt`` and ``layer_N_output.pt``, as `LayerRecorder` exports and others write.

    A file is read when its value is asked for; a large one piece by piece.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.label = str(folder)
        if not self.folder.is_dir():
            raise RunNotFoundError(f"there is no folder {self.folder}")
        self._files: dict[str, Path] = {}
        if (self.folder / _EMBEDDING_FILE).is_file():
            self._files["layer_0:output"] = self.folder / _EMBEDDING_FILE
        numbered = sorted(
            (int(match.group(1)), path)
            for path in self.folder.iterdir()
            if (match := _LAYER_FILE.match(path.name))
        )
        for number, path in numbered:
            self._files.setdefault(site_name(f"layer_{number}", "output"), path)
        if not self._files:
            raise CompareError(
                f"{self.folder} has neither {_EMBEDDING_FILE} nor layer_N_output.pt files, and is no run folder"
            )
        # Further passes (decode steps, batches) are folders of the same layout inside this one.
        inner = [
            path for path in self.folder.iterdir() if path.name.startswith(_PASSES) and is_layer_folder(path)
        ]
        self._passes = [FolderRecording(path) for path in sorted(inner, key=_pass_number)]

    def steps(self) -> list[int]:
        return list(range(1 + len(self._passes)))

    def sites(self, step: int) -> list[KnownSite]:
        if step:
            return self._passes[step - 1].sites(0)
        return [KnownSite(name) for name in self._files]

    def file(self, site: str) -> Path:
        """The file that holds a layer of the first pass."""
        return self._files[site]

    def value(self, site: str, step: int) -> Value | None:
        if step:
            return self._passes[step - 1].value(site, 0)
        path = self._files[site]
        try:
            return _saved_tensor(path).value()
        except Unreadable:
            from torchtap.comparison.recorded.torch_files import load_tensor

            return value_of(load_tensor(path))

    def stream(self, site: str, step: int) -> ValueStream | None:
        if step:
            return self._passes[step - 1].stream(site, 0)
        try:
            saved = _saved_tensor(self._files[site])
        except Unreadable:
            return None
        return saved.stream(PIECE_BYTES) if _is_streamed(saved.shape, saved.dtype) else None

    def statistics(self, name: str, step: int) -> dict[str, float]:
        return {}

    def numbers(self) -> tuple[int, ...]:
        """The numbers of the layers of the first pass, in order."""
        return tuple(int(path_of(name).removeprefix("layer_")) for name in self._files)

    def problems(self) -> list[str]:
        expected = _recorded_layers(self.folder)
        if expected is None:
            expected = set(range(max(self.numbers()) + 1))
        missing = sorted(expected - set(self.numbers()))
        return [f"{self.folder}: no file for layer {number}" for number in missing]

    def damage(self) -> list[str]:
        return []  # a layer that one folder lacks is seen beside the other


@final
class RunRecording:
    """A run folder: whole tensors where they were kept, statistics everywhere else."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.label = str(run.path)
        self._tensors: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {}
        for ref in run.tensors():
            if ref.field == "value" and ref.reduction == "full":
                self._tensors.setdefault(ref.step, {})[ref.site] = (tuple(ref.shape), ref.dtype)
        self._matrices: dict[str, tuple[list[str], dict[int, int], Any]] = {}
        self._kept = set(run.statistics())
        # The session notes the sites in their order of execution as soon as it knows them; the reader checks it.
        noted = run.site_facts()
        self._noted = list(noted)
        self._dtypes = {
            name: dtype for name, facts in noted.items() if isinstance(dtype := facts.get("dtype"), str)
        }

    def __reduce__(self) -> tuple[type[RunRecording], tuple[Run]]:
        """In another process the run is opened anew."""
        return RunRecording, (self.run,)

    @property
    def leaves_out_steps(self) -> bool:
        """Whether a predicate decided which steps were recorded: the plan does not tell them."""
        plan = self.run.manifest.get("plan")
        taps = plan.get("taps") if isinstance(plan, dict) else None
        schedules = [tap.get("schedule") for tap in taps or () if isinstance(tap, dict)]
        return any('"when"' in json.dumps(schedule) for schedule in schedules)

    def steps(self) -> list[int]:
        return [int(step) for step in self.run.steps()]

    def sites(self, step: int) -> list[KnownSite]:
        whole = self._tensors.get(step, {})
        numbers = [name for name in self.statistics("l2", step) if name not in whole]
        numbers += [name for name in self.statistics("value", step) if _is_causal(name) and name not in whole]
        named = [KnownSite(name, shape, dtype) for name, (shape, dtype) in whole.items()]
        named += [KnownSite(name, None, self._dtypes.get(name)) for name in dict.fromkeys(numbers)]
        place = self._places([site.name for site in named])
        # What an optimizer does follows from its state and its rate; the run lists them side by side.
        return sorted(named, key=lambda site: (_CAUSES.get(kind_of(site.name), 0), place[site.name]))

    def _places(self, names: list[str]) -> dict[str, int]:
        """Where each site stands in the step: by the session's note, or by its name where there is none."""
        unnoted = sorted(set(names).difference(self._noted))
        if any(passes_modules(name) for name in unnoted):
            keys = execution_order(names)
            ordered = sorted(names, key=keys.__getitem__)
        else:  # a logged loss, say: its kind tells the place, and the others keep theirs
            ordered = in_passing_order([*self._noted, *unnoted])
        return {name: n for n, name in enumerate(ordered)}

    def value(self, site: str, step: int) -> Value | None:
        if site not in self._tensors.get(step, {}):
            return None
        return Value(self.run.array(site, step), self._tensors[step][site][1])

    def stream(self, site: str, step: int) -> ValueStream | None:
        shape, dtype = self._tensors.get(step, {}).get(site, ((), ""))
        if not _is_streamed(shape, dtype):
            return None
        found = self.run.tensor_pieces(site, step, size=PIECE_BYTES)
        return None if found is None else ValueStream(shape, dtype, found[1])

    def statistics(self, name: str, step: int) -> dict[str, float]:
        if name not in self._kept:
            return {}
        if name not in self._matrices:
            sites, steps, values = self.run.matrix(name)
            self._matrices[name] = (list(sites), {int(s): n for n, s in enumerate(steps)}, values)
        sites, places, values = self._matrices[name]
        if step not in places:
            return {}
        column = values[:, places[step]]
        if name in ("nans", "infs", "count", "value"):
            return {site: float(value) for site, value in zip(sites, column, strict=True) if value == value}
        counted = self.statistics("count", step)
        return {
            site: float(value)
            for site, value in zip(sites, column, strict=True)
            if value == value or site in counted  # NaN as a statistic, not as "was not recorded"
        }

    def problems(self) -> list[str]:
        return [f"{self.label}: {problem}" for problem in self.run.problems]

    def damage(self) -> list[str]:
        return self.problems()


def _is_causal(site: str) -> bool:
    """Whether a single number is part of the training itself; what else a program logs (times, scores) is not."""
    name = read_name(site)
    return name.kind in _CAUSES or (name.kind == "value" and "loss" in name.leaf.lower())


def _is_streamed(shape: tuple[int, ...], dtype: str) -> bool:
    return can_stream(dtype) and prod(shape) * BY_NAME[dtype].size >= _STREAMED


def _saved_tensor(path: Path) -> SavedTensor:
    """The tensor of a file; of several that a module returned the first."""
    try:
        found = read_saved(path)
    except FileNotFoundError as error:
        raise RunNotFoundError(f"there is no file {path}") from error
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, SavedTensor):
        raise RunCorruptError(f"{path} holds a {type(found).__name__} where a tensor was expected")
    return found


def _metadata(folder: Path) -> Mapping[str, Any]:
    """What a recording says of itself; empty where it says nothing that can be read without torch."""
    try:
        found = read_saved(folder / "metadata.pt")
    except (
        Unreadable,
        RunCorruptError,
        OSError,
    ):  # written by others, or damaged: the files themselves count
        return {}
    return found if isinstance(found, dict) else {}


def _pass_number(folder: Path) -> tuple[int, str]:
    """A pass's place in order: what it says of itself, else its name."""
    number = _metadata(folder).get("pass")
    return (number if isinstance(number, int) else 1 << 60), folder.name


def _recorded_layers(folder: Path) -> set[int] | None:
    """The numbers of the layers that a recording says it has; ``None`` where it says nothing."""
    try:
        return {int(name.removeprefix("layer_")) for name in _metadata(folder)["sites"]}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def is_layer_folder(folder: Path) -> bool:
    """Whether a folder holds files of that layout."""
    return folder.is_dir() and any(
        path.name == _EMBEDDING_FILE or _LAYER_FILE.match(path.name) for path in folder.iterdir()
    )
