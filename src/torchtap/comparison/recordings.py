"""Give every source that can be compared one interface: its steps, its sites in order, and each site's value.

Sources: values in memory, a run folder, a folder of ``layer_N_output.pt`` files. A recording returns one value at a
time and keeps none, so that a comparison holds two values at most. torch is imported only for tensors in memory and
``.pt`` files.

Not here: running a model (`live`), comparing (`recorded`).
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from torchtap.comparison.align import KnownSite
from torchtap.comparison.measures import PIECE_BYTES, Measures, ValueStream, can_stream, measure
from torchtap.comparison.values import Comparable, Value, name_of, value_of
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
    from torch import Tensor

    from torchtap.store.read.reader import Run

__all__ = [
    "STATISTICS",
    "FolderRecording",
    "Gap",
    "LayerChange",
    "MemoryRecording",
    "Recording",
    "RunRecording",
    "Unrecorded",
    "describe",
    "gaps_between",
    "is_layer_folder",
    "is_live",
    "layer_changes",
    "load_tensor",
    "recording_of",
    "relative",
    "some_steps",
    "statistics_of",
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
        return value_of(load_tensor(self._files[site]))

    def stream(self, site: str, step: int) -> ValueStream | None:
        return None  # a file is mapped, and its pages are released when the value is

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
        """Return True if a predicate decided which steps were recorded: the plan does not tell them."""
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


def load_tensor(path: Path) -> Tensor:
    """Return the tensor of a ``.pt`` file, mapped into memory; of a tuple the first. Run no code from the file.

    torch does not verify the checksums of the archive, so they are verified first.
    """
    found = _load(path)
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not hasattr(found, "untyped_storage"):
        raise RunCorruptError(f"{path} holds a {type(found).__name__} where a tensor was expected")
    return found  # type: ignore[return-value]


def _load(path: Path) -> object:
    try:
        mapped = zipfile.is_zipfile(path)
        if mapped:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise RunCorruptError(f"{path} is damaged: the checksum of {damaged} is wrong")
        import torch

        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise RunNotFoundError(f"there is no file {path}") from error
    except RunCorruptError:
        raise
    except Exception as error:  # damaged bytes may fail anywhere
        line = (str(error).splitlines() or [""])[0][:200]
        raise RunCorruptError(
            f"{path} cannot be read as a tensor; was it written by torch.save? ({type(error).__name__}: {line})"
        ) from error


def _metadata(folder: Path) -> Mapping[str, Any]:
    """Return the metadata of a folder of layer files; empty if there is none that can be read."""
    try:
        found = _load(folder / "metadata.pt")
    except (RunCorruptError, RunNotFoundError):
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
    """Return True if a folder holds files of that layout."""
    return folder.is_dir() and any(
        path.name == _EMBEDDING_FILE or _LAYER_FILE.match(path.name) for path in folder.iterdir()
    )


def is_live(thing: object) -> bool:
    """Return True if this is something to run."""
    return callable(thing) and not isinstance(thing, (Mapping, type))


def describe(thing: Any) -> str:
    """What to call it in a report."""
    if isinstance(thing, (str, os.PathLike)):
        return os.fspath(thing)
    if is_live(thing):
        return type(thing).__name__
    return str(getattr(thing, "label", None) or getattr(thing, "path", None) or type(thing).__name__)


def recording_of(thing: Any) -> Recording:
    """A recording of something that is not to be run."""
    if isinstance(thing, (str, os.PathLike)):
        return _from_path(thing)
    if _has(thing, "tensors", "matrix"):
        return RunRecording(thing)
    if _has(thing, "sites", "value", "problems"):
        return thing  # type: ignore[no-any-return]
    if isinstance(thing, Mapping):
        values, left = _tensors_of(thing)
        if not values:
            raise CompareError("the mapping has no tensors to compare")
        return MemoryRecording(values, "values", left)
    if isinstance(thing, Sequence):
        values, left = _tensors_of(
            {site_name(f"layer_{n}", "output"): value for n, value in enumerate(thing)}
        )
        if values:
            return MemoryRecording(values, "layers", left)
    raise CompareError(
        f"cannot compare a {type(thing).__name__}: give a run, a folder of layer files, a mapping from names to "
        "tensors, or a model together with inputs=..."
    )


def _has(thing: object, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)


def _tensors_of(thing: Mapping[Any, Any]) -> tuple[dict[str, Comparable], tuple[str, ...]]:
    """The tensors and arrays of a mapping, and what else it holds, which is told and never lost in silence."""
    values: dict[str, Comparable] = {}
    left = []
    for name, value in thing.items():
        if hasattr(value, "untyped_storage") or (
            isinstance(value, np.ndarray) and value.dtype.kind in "fiubc"
        ):
            values[str(name)] = value
        elif isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
            values[str(name)] = np.asarray(value)
        else:
            left.append(f"{name} is a {type(value).__name__}, not a tensor")
    return values, tuple(left)


def _from_path(path: str | os.PathLike[str]) -> Recording:
    from torchtap.store.read.reader import is_run, open_run

    text = os.fspath(path)
    if "://" not in text:
        if not Path(text).exists():
            raise RunNotFoundError(f"there is no run and no folder at {text}")
        if not Path(text).is_dir():
            raise CompareError(
                f"{text} is a file; compare takes folders: a run, or one with layer_N_output.pt files"
            )
        if not is_run(text) and is_layer_folder(Path(text)):
            return FolderRecording(text)
    return RunRecording(open_run(text))


# A statistic sums over many elements, so it is steadier than the elements; each is measured by its own scale.
STATISTICS = {
    "l2": "l2",
    "rms": "rms",
    "std": "rms",
    "absmax": "absmax",
    "mean": "rms",
    "min": "absmax",
    "max": "absmax",
    "l1": "l1",
    "value": "value",  # of what is one number: a learning rate, a loss
}


def relative(mine: float, theirs: float, scale: float) -> float:
    """The distance of two numbers on a scale; infinite when one of them is no number or the scale is zero."""
    if mine == theirs:
        return 0.0
    difference = abs(theirs - mine)
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else math.inf


def statistics_of(value: Value) -> dict[str, float]:
    """The statistics of a value as a run records them: of the finite numbers, of complex ones by their magnitude."""
    numbers = np.abs(value.array) if value.is_complex else value.array
    wide = numbers.reshape(-1).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    found = {
        "count": float(wide.size),
        "nans": float(np.isnan(wide).sum()),
        "infs": float(np.isinf(wide).sum()),
        "l1": float(np.abs(finite).sum()),
        "l2": float(np.linalg.norm(finite)),
    }
    if not finite.size:
        return found | dict.fromkeys(("mean", "std", "min", "max", "absmax", "rms"), math.nan)
    return found | {
        "mean": float(finite.mean()),
        "std": float(finite.std(ddof=1)) if finite.size > 1 else math.nan,
        "min": float(finite.min()),
        "max": float(finite.max()),
        "absmax": float(np.abs(finite).max()),
        "rms": found["l2"] / math.sqrt(finite.size),
    }


@final
@dataclass(frozen=True, slots=True)
class Gap:
    """Steps of one recording that the other lacks, in a sentence; ``planned`` if its plan may have left them out."""

    told: str
    planned: bool


def gaps_between(
    reference: Recording, target: Recording, left: Sequence[int], right: Sequence[int]
) -> Iterator[Gap]:
    """The steps that are in one recording alone."""
    for recording, steps, other, others in (
        (reference, left, target, right),
        (target, right, reference, left),
    ):
        extra = sorted(set(steps) - set(others))
        if extra:
            told = (
                f"{recording.label}: {len(extra)} steps are not in the other recording ({some_steps(extra)})"
            )
            yield Gap(told, planned=_leaves_out_steps(other) and extra[-1] < max(others))


@final
@dataclass(eq=False)
class Unrecorded:
    """Notices steps of which one recording has nothing but logged numbers."""

    reference: Recording
    target: Recording
    _steps: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def on_both(
        self, step: int, left: list[KnownSite], right: list[KnownSite]
    ) -> tuple[list[KnownSite], list[KnownSite]]:
        """What is to be compared of a step: its logged numbers alone where one side recorded no more."""
        logged = [_logged(left), _logged(right)]
        bare = [len(logged[0]) == len(left), len(logged[1]) == len(right)]
        if bare[0] == bare[1] or not (left and right):
            return left, right
        self._steps[bare.index(True)].append(step)
        return logged[0], logged[1]

    def told(self) -> list[Gap]:
        """The steps so far, in sentences."""
        sides = zip((self.reference, self.target), self._steps, strict=True)
        return [
            Gap(
                f"{recording.label}: {len(steps)} steps have logged numbers only ({some_steps(steps)})",
                planned=_leaves_out_steps(recording),
            )
            for recording, steps in sides
            if steps
        ]


def some_steps(steps: Sequence[int]) -> str:
    """A few steps, and the last."""
    shown = ", ".join(map(str, steps[:6]))
    return f"{shown} ... {steps[-1]}" if len(steps) > 6 else shown or "none"


def _logged(sites: Sequence[KnownSite]) -> list[KnownSite]:
    return [site for site in sites if kind_of(site.name) == "value"]


def _leaves_out_steps(recording: Recording) -> bool:
    return isinstance(recording, RunRecording) and recording.leaves_out_steps


@final
@dataclass(frozen=True, slots=True)
class LayerChange:
    """From one layer's output to the next."""

    before: str
    after: str
    measures: Measures | None  # None when the shapes differ
    note: str = ""

    @property
    def relative(self) -> float:
        """The size of the change relative to what came in; NaN when it has none."""
        return float("nan") if self.measures is None else self.measures.rel_l2


def layer_changes(
    source: object, sites: list[str] | None = None, *, step: int | None = None
) -> list[LayerChange]:
    """Compare each layer with the one before it.

    ``source`` is whatever `torchtap.compare` takes as a recording; ``sites`` picks and orders the layers when it
    holds more than them.
    """
    recording: Recording = recording_of(source)
    at = recording.steps()[-1] if step is None else step
    names = sites or [site.name for site in recording.sites(at)]
    changes = []
    value = recording.value(names[0], at) if names else None
    for before, after in pairwise(names):
        following = recording.value(after, at)
        if value is None or following is None:
            changes.append(LayerChange(before, after, None, "only statistics were kept"))
        elif value.shape != following.shape:
            changes.append(
                LayerChange(
                    before, after, None, f"shapes differ: {tuple(value.shape)}, {tuple(following.shape)}"
                )
            )
        else:
            changes.append(LayerChange(before, after, measure(value, following)))
        value = following
    return changes
