"""Record the hidden states of a model, layer by layer and pass by pass, without changing its code.

    with tt.record_layers(model, out_dir="layers") as recorder:
        model(**inputs)
    hidden_states = tt.get_layer_hidden_states()

Layer 0 is the input of the first block: the embedding's output with everything that the model adds to it. Layer N is
the output of the N-th block, before a final norm of the model; Hugging Face's ``hidden_states[-1]`` is after it.
Guarantees:
- the model's signature and results do not change;
- switched off, the model carries no hook of the recorder;
- each thread sees the layers of its own last pass;
- with ``out_dir`` a pass is on disk when the model returns, and only the last one is in memory;
- every file loads with ``torch.load(..., weights_only=True)``.

A recorder is a watch whose steps are passes. Its run is in ``out_dir/run``; the files of the first pass are in
``out_dir``, those of each later pass in a folder (``decode_0001`` … in generation with a cache, else ``pass_0001`` …):
``embedding_output.pt``, ``layer_N_output.pt``, ``statistics.pt``, ``metadata.pt``. A layer keeps its number if only
some layers are recorded.
"""

from __future__ import annotations

import datetime
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast, final, overload

import torch
from torch import Tensor, nn

from torchtap import Full, Watch, tap, watch
from torchtap._torch import TORCH_VERSION
from torchtap.comparison.recordings import (
    FolderRecording,
    LayerChange,
    is_layer_folder,
    layer_changes,
    load_tensor,
)
from torchtap.errors import OutputError, RunCorruptError, SelectionError, SessionError
from torchtap.forms.attach import tree_of
from torchtap.hooks.hooks import after, before
from torchtap.spi import ModulePath, Name, StepRecord, places

__all__ = [
    "LayerNames",
    "LayerPass",
    "LayerRecorder",
    "Layers",
    "find_layers",
    "get_layer_hidden_states",
    "open_layers",
    "record_layers",
    "write_layers",
]

_last_pass = threading.local()


def get_layer_hidden_states() -> list[Tensor] | None:
    """Return the layers of the last recorded pass of this thread, or None if there was none."""
    return getattr(_last_pass, "layers", None)


def record_layers(
    model: Any,
    out_dir: str | Path | None = None,
    layers: Sequence[int | str] | None = None,
    *,
    enabled: bool = True,
    record_layer_outputs: bool | None = None,
) -> LayerRecorder:
    """Record embedding and blocks of every pass from now on, until the recorder is closed.

        with tt.record_layers(model, "layers", layers=[0, 30, 61]):
            model(**inputs)

    model: the model, in any form; or a ``vllm.LLM``, for one folder for each request, when the block is left.
    out_dir: folder for the run and the files; None keeps the last pass in memory only.
    layers: indices of blocks, ``"embedding"`` for the input of the first one, or selectors. All layers by default.
    enabled: False returns a recorder that is switched off. ``record_layer_outputs`` means the same and wins.

    Returns a `LayerRecorder`. Raises `SelectionError` if the model has no blocks or not those in ``layers``, and
    `OutputError` if ``out_dir`` already holds a recording.
    """
    on = enabled if record_layer_outputs is None else record_layer_outputs
    if hasattr(model, "collective_rpc"):  # a serving engine
        from torchtap.serving.layer_files import record_engine_layers

        return cast("LayerRecorder", record_engine_layers(model, out_dir, layers, enabled=on))
    return LayerRecorder(model, out_dir, layers, enabled=on)


def open_layers(folder: str | Path) -> Layers:
    """Open a folder of layer files: ``layers[30]``, ``layers.statistics["layer_30"]``, ``layers.changes()``."""
    return Layers(folder)


# -- the layers of a model -------------------------------------------------------------------------------------

# A list of blocks counts beside the largest one if it holds at least this share of its parameters: the stages of a
# convolutional network and the two halves of an encoder-decoder do, a list of adapters or heads does not.
_SHARE = 0.05


class LayerNames(NamedTuple):
    """The paths of a model's embedding and blocks, in the order in which they are listed."""

    embedding: str | None
    blocks: tuple[str, ...]


def find_layers(model: object) -> LayerNames:
    """Return the embedding and the blocks of a model, found by its structure.

    Blocks are the largest lists of like modules that are not inside one another. The embedding is what
    ``get_input_embeddings()`` returns, else the first ``nn.Embedding``. Raises `SelectionError` if there is no list.
    """
    found = {place.path: place.module for place in places(tree_of(model))}
    lists = {path: children for path, module in found.items() if (children := _like_children(module))}
    outer = [path for path in lists if not any(ModulePath(path).is_inside(other) for other in lists)]
    if not outer:
        raise SelectionError(
            f"{type(model).__name__} has no list of like modules that could be its blocks; "
            "name them with layers=[...], for example layers=['encoder.*:output']"
        )
    sizes = {path: sum(p.numel() for p in found[path].parameters()) for path in outer}
    largest = max(sizes.values())
    blocks = [
        str(ModulePath(path) / name)
        for path in outer
        if sizes[path] >= _SHARE * largest
        for name in lists[path]
    ]
    return LayerNames(_embedding(model, found), tuple(blocks))


def _final_norm(model: object, names: LayerNames) -> str | None:
    """Return the norm behind the last block and outside of the blocks, as far as the modules' order shows it."""
    found = {place.path: place.module for place in places(tree_of(model))}
    last = ModulePath(names.blocks[-1])
    for inner, outer in pairwise((last.parent, *last.parent.parents)):
        children = [outer / name for name in found[outer]._modules] if outer in found else []
        if inner in children:
            for path in children[children.index(inner) + 1 :]:
                if path in found and "norm" in _class_name(found[path]).lower():
                    return str(path)
    return None


def _like_children(module: nn.Module) -> list[str]:
    """Return the names of a list's members if they are two or more modules of one class that have parameters."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    if len(children) < 2 or not all(map(str.isdigit, children)):
        return []
    if len(set(map(_class_name, children.values()))) != 1:
        return []
    return list(children) if any(any(True for _ in child.parameters()) for child in children.values()) else []


def _class_name(module: nn.Module) -> str:
    """Return the class that a module was written as, also after scripting."""
    return str(getattr(module, "original_name", type(module).__qualname__))


def _embedding(model: object, found: Mapping[str, nn.Module]) -> str | None:
    input_embeddings: Callable[[], Any] | None = getattr(model, "get_input_embeddings", None)
    if callable(input_embeddings):
        try:
            embedding = input_embeddings()
        except (NotImplementedError, AttributeError, TypeError):  # models may leave it unimplemented
            embedding = None
        for path, module in found.items():
            if module is embedding:
                return path
    return next((path for path, m in found.items() if _class_name(m) in ("Embedding", "EmbeddingBag")), None)


@final
class _Chosen:
    """The layers to record: all, some blocks by index, or selectors."""

    def __init__(self, model: object, layers: Sequence[int | str] | None) -> None:
        self._all = layers is None
        by_index = layers is None or any(isinstance(each, int) or each == "embedding" for each in layers)
        self.names: LayerNames | None
        try:
            self.names = find_layers(model)
        except SelectionError:
            if by_index:
                raise
            self.names = None  # selectors do not need them
        everything = ("embedding", *range(len(self.names.blocks))) if self.names else ()
        wanted = everything if layers is None else tuple(layers)
        self._selectors = [each for each in wanted if isinstance(each, str) and each != "embedding"]
        self._with_embedding = "embedding" in wanted
        self._blocks = [self._block(each) for each in wanted if not isinstance(each, str)]

    def _block(self, index: int) -> str:
        assert self.names is not None
        count = len(self.names.blocks)
        if isinstance(index, bool) or not -count <= index < count:
            raise SelectionError(f"layers has {index!r}: this model has {count} blocks, 0 to {count - 1}")
        return self.names.blocks[index]

    def selectors(self) -> list[str]:
        """Return selectors of all values that may be needed."""
        chosen = [Name(path, "output") for path in self._blocks]
        if self._with_embedding and self.names is not None:
            chosen.append(Name(self.names.blocks[0], "input"))
            if self.names.embedding is not None:
                chosen.append(Name(self.names.embedding, "output"))
        # A path without a dot would match at any depth; a regular expression matches the top level alone.
        return self._selectors + [
            str(name) if name.module.parent else f"re:{re.escape(str(name))}" + r"(\..*)?(#\d+)?"
            for name in chosen
        ]

    def in_order(self, sites: Sequence[str]) -> list[int]:
        """Return the positions of the layers among sites in execution order, one for each call.

        Of a value with several leaves the first counts. Layer 0 comes first: the input of the first block, or the
        embedding's output if that is missing.
        """
        first: dict[tuple[str, str, int], int] = {}
        for position, site in enumerate(sites):
            name = Name.parse(site)
            first.setdefault((name.path, name.kind, name.call), position)
        if self._selectors or self.names is None:
            return list(first.values())
        blocks = set(self._blocks)
        chosen = [at for (path, kind, _), at in first.items() if path in blocks and kind == "output"]
        if self._with_embedding:
            entering = first.get((self.names.blocks[0], "input", 0))
            if entering is None and self.names.embedding is not None:
                entering = first.get((self.names.embedding, "output", 0))
            if entering is not None:
                chosen.insert(0, entering)
        return chosen

    def numbers(self, sites: Sequence[str]) -> tuple[int, ...]:
        """Return the number of each layer. Layers whose number the model does not show are counted in order."""
        own = [self._number(Name.parse(site)) for site in sites]
        known = [number for number in own if number is not None]
        if not self._all and len(known) == len(own) and len(set(known)) == len(known):
            return tuple(known)
        start = 0 if own and own[0] == 0 else 1
        return tuple(range(start, start + len(own)))

    def _number(self, name: Name) -> int | None:
        if self.names is None:
            return None
        blocks = self.names.blocks
        if name.path == self.names.embedding or (name.path == blocks[0] and name.kind == "input"):
            return 0
        for index, block in enumerate(blocks):
            if name.path == block or name.module.is_inside(block):
                # A model that runs through its blocks again continues to count.
                return name.call * len(blocks) + index + 1
        return None


# -- recording -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class LayerPass:
    """One pass over the model."""

    number: int
    phase: Literal["prefill", "decode"]
    tokens: int | None  # along the second axis of the hidden states
    sites: tuple[str, ...]  # of each layer, in order
    layers: tuple[int, ...]  # the number of each: 0 is the input of the blocks, N the output of the N-th
    folder: Path | None


@final
@dataclass(slots=True)
class _OpenPass:
    """The pass that runs now: its step in the watch and the length of its cache."""

    step: Any
    cached_tokens: int
    depth: int = 1  # calls of the model inside each other
    failed: bool = False


@final
class LayerRecorder:
    """Made by `record_layers`. A context manager; also closed by `close`."""

    def __init__(
        self,
        model: Any,
        out_dir: str | Path | None = None,
        layers: Sequence[int | str] | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self.model = model
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.passes: list[LayerPass] = []
        self._wanted = layers
        self._chosen: _Chosen | None = None
        self._watch: Watch | None = None
        self._handles: list[Any] = []
        self._lock = threading.RLock()  # passes of several threads are recorded one after the other
        self._open: _OpenPass | None = None
        self._started = 0
        self._layers: list[Tensor] = []
        self._final_norm: str | None = None
        self._closed = False
        if enabled:
            self.enable()

    @property
    def enabled(self) -> bool:
        """Return True if passes are recorded."""
        return bool(self._handles)

    @property
    def hidden_states(self) -> list[Tensor]:
        """Return the layers of the last pass, in any thread."""
        return list(self._layers)

    def enable(self) -> None:
        """Record the passes from now on."""
        if self._closed:
            raise SessionError("this recorder is closed; make a new one to go on")
        if self.enabled:
            return
        self._start()
        if isinstance(self.model, torch.jit.ScriptModule):  # which takes no hooks of this kind
            self._handles = [_Around(self.model, self._begin, self._end)]
        elif isinstance(self.model, nn.Module):
            self._handles = [
                before(self.model, self._begin, first=True),
                after(self.model, self._end, always=True),
            ]

    def disable(self) -> None:
        """Record nothing until `enable` is called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        """Remove everything from the model and finish the files."""
        self.disable()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Mark one pass by hand, for models without hooks (packaged ones, loops around submodules)."""
        if self._watch is None:
            yield
            return
        self._begin(None, (), {})
        try:
            yield
        finally:
            self._end(None, (), True)

    def _start(self) -> None:
        if self._chosen is None:
            if self.out_dir is not None and is_layer_folder(self.out_dir):
                raise OutputError(
                    f"{self.out_dir} already holds a recording of layers: give another folder, or delete this one first"
                )
            self._chosen = _Chosen(self.model, self._wanted)
            names = self._chosen.names
            self._final_norm = None if names is None else _final_norm(self.model, names)
        taps = [tap(selector, keep=Full()) for selector in self._chosen.selectors()]
        folder = None if self.out_dir is None else self.out_dir / "run"
        self._watch = watch(self.model, folder, taps, sinks=[self])

    # -- a pass ------------------------------------------------------------------------------------------------

    def _begin(self, module: object, args: object, kwargs: Mapping[str, Any]) -> None:
        self._lock.acquire()
        if self._open is not None:
            self._open.depth += 1
            return
        assert self._watch is not None
        step = self._watch.step(self._started)
        self._started += 1
        self._open = _OpenPass(step, _cache_length(kwargs))
        step.__enter__()

    def _end(self, module: object, args: object, output: object) -> None:
        opened = self._open
        if opened is None:
            return
        try:
            opened.depth -= 1
            if not opened.depth:
                opened.failed = output is None  # torch calls this hook also if the forward raised
                opened.step.__exit__(None, None, None)
                if self._watch is not None:
                    self._watch.end_step()
                self._open = None
        finally:
            self._lock.release()

    def write(self, record: StepRecord) -> None:
        """Take one pass from the watch, whose sink this is."""
        opened = self._open
        if opened is None or opened.failed or self._chosen is None:
            return
        sites = [item.site for item in record.tensors]
        positions = self._chosen.in_order(sites)
        if not positions:
            warnings.warn(
                "a pass brought no layer; was the model compiled after record_layers? Give it the compiled model",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        chosen = tuple(sites[position] for position in positions)
        self._layers = [record.tensors[position].value for position in positions]
        _last_pass.layers = list(self._layers)
        tokens = int(self._layers[-1].shape[1]) if self._layers[-1].dim() >= 3 else None
        # A pass with a cache, or of one token after a longer one, decodes.
        again = bool(self.passes) and tokens == 1 and self.passes[0].tokens not in (1, None)
        phase: Literal["prefill", "decode"] = "decode" if opened.cached_tokens > 0 or again else "prefill"
        numbers, number = self._chosen.numbers(chosen), len(self.passes)
        found = LayerPass(number, phase, tokens, chosen, numbers, self._folder(number, phase))
        self.passes.append(found)
        if found.folder is not None:
            numbered = dict(zip(numbers, self._layers, strict=True))
            write_layers(found.folder, numbered, self._metadata(found, record, opened.cached_tokens))

    def hint(self, topic: str, message: str) -> None:
        """Drop a hint of the watch: a step here is one pass, with or without an update."""

    def _folder(self, number: int, phase: str) -> Path | None:
        if self.out_dir is None:
            return None
        if number == 0:
            return self.out_dir
        if phase == "decode":
            decoded = sum(each.phase == "decode" for each in self.passes)
            return self.out_dir / f"decode_{decoded + 1:04d}"
        return self.out_dir / f"pass_{number:04d}"

    def _metadata(self, found: LayerPass, record: StepRecord, cached_tokens: int) -> dict[str, Any]:
        names = None if self._chosen is None else self._chosen.names
        return {
            "model": type(self.model).__name__,
            "layers": sum(number > 0 for number in found.layers),
            "blocks": None if names is None else len(names.blocks),
            "sites": {f"layer_{n}": site for n, site in zip(found.layers, found.sites, strict=True)},
            "final_norm": self._final_norm,  # which the last layer has not passed
            "pass": record.step,
            "phase": found.phase,
            "tokens": found.tokens,
            "cached_tokens": cached_tokens,
            "created": datetime.datetime.fromtimestamp(record.time, datetime.UTC).isoformat(),
            "torch": TORCH_VERSION,
        }


@final
class _Around:
    """Run functions before and after a forward. The replacement is kept in the instance."""

    def __init__(self, module: Any, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self._attributes: dict[str, Any] = module.__dict__
        self._before = self._attributes.get("forward")
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            begin(module, args, kwargs)
            output = None
            try:
                output = inner(*args, **kwargs)
                return output
            finally:
                end(module, args, output)

        self._attributes["forward"] = forward

    def remove(self) -> None:
        """Restore the module."""
        if self._before is None:
            self._attributes.pop("forward", None)
        else:
            self._attributes["forward"] = self._before


def _cache_length(kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens in a key-value cache among the arguments."""
    for name in ("past_key_values", "past_key_value", "cache", "kv_cache"):
        cache = kwargs.get(name)
        length = getattr(cache, "get_seq_length", None)
        if callable(length):
            return int(length())
        if isinstance(cache, (tuple, list)) and cache and isinstance(cache[0], (tuple, list)):
            first = cache[0][0]
            return int(first.shape[-2]) if isinstance(first, Tensor) else 0
    return 0


# -- files -----------------------------------------------------------------------------------------------------


def _statistics(value: Tensor) -> dict[str, Any]:
    """Return the entry of one layer in ``statistics.pt``."""
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


def write_layers(folder: Path, layers: Mapping[int, Tensor], metadata: dict[str, Any]) -> None:
    """Write the files of one pass: a tensor for each layer, ``statistics.pt`` and ``metadata.pt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in layers.items():
        name = "embedding_output.pt" if number == 0 else f"layer_{number}_output.pt"
        torch.save(value.detach().contiguous().clone(), folder / name)
    statistics = {f"layer_{number}": _statistics(value) for number, value in layers.items()}
    torch.save(statistics, folder / "statistics.pt")
    torch.save(metadata, folder / "metadata.pt")


@final
class Layers(Sequence[Tensor]):
    """The layers of one recorded pass, by number. A layer is read when it is used.

    ``numbers`` lists the recorded layers; ``layers[-1]`` is the last of them.
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
        return load_tensor(self._recording.file(f"layer_{index}:output"))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in self.numbers)

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each layer, from the file or, without one, from the layers themselves."""
        path = self.folder / "statistics.pt"
        if path.is_file():
            loaded: dict[str, dict[str, Any]] = self._load(path)
            return loaded
        return {f"layer_{number}": _statistics(self[number]) for number in self.numbers}

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the recording's description of itself; an empty dict if there is none."""
        path = self.folder / "metadata.pt"
        return self._load(path) if path.is_file() else {}

    def changes(self) -> list[LayerChange]:
        """Return how much each layer changes its input."""
        return layer_changes(self._recording)

    def passes(self) -> list[Path]:
        """Return the folders of further passes, in order."""
        return sorted(
            path for path in self.folder.iterdir() if path.is_dir() and (path / "metadata.pt").is_file()
        )

    def _load(self, path: Path) -> Any:
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:
            raise RunCorruptError(f"{path} cannot be read: {type(error).__name__}") from error
