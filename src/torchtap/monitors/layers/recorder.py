"""Record the hidden states of a model, layer by layer and pass by pass, without touching its code.

    with tt.record_layers(model, out_dir="layers") as recorder:
        model(**inputs)
    hidden_states = tt.get_layer_hidden_states()

A plan over the core: whole outputs of the blocks and the input of the first one, one step for each pass. Layer 0
is what enters the first block (the embedding's output, with whatever the model adds to it); layer N is what the
N-th block returns. It guarantees:
- the model's signature and results stay as they are;
- switched off, the model carries nothing of the recorder;
- each thread sees the layers of its own last pass;
- with ``out_dir`` a pass is on disk when the model returns, and only the last one is in memory.

The run is in ``out_dir/run``, the files for each layer (`layer_files`) in ``out_dir``: those of the first pass, and
a folder for each later one (``decode_0001`` ... in generation with a cache, else ``pass_0001`` ...).
"""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from torchtap.errors import SessionError
from torchtap.monitors.layers.files import write_layers
from torchtap.monitors.layers.names import LayerNames, find_layers
from torchtap.names import parent_path, path_of, site_name
from torchtap.plan import tap
from torchtap.reduce import Full
from torchtap.session import watch
from torchtap.sites import Site
from torchtap.store.record import StepRecord
from torchtap.taps.walk.ways import HookWay
from torchtap.watching import Watch

__all__ = ["LayerPass", "LayerRecorder", "get_layer_hidden_states", "record_layers"]

_last_pass = threading.local()


def get_layer_hidden_states() -> list[Tensor] | None:
    """The layers of the last pass that a recorder saw in this thread; ``None`` when there was none."""
    return getattr(_last_pass, "layers", None)


def record_layers(
    model: Any,
    out_dir: str | Path | None = None,
    layers: Sequence[str] | None = None,
    *,
    enabled: bool = True,
) -> LayerRecorder:
    """Record embedding and blocks of every pass from now on, until the recorder is closed.

    ``layers`` are selectors of what to record as layers, in place of what `find_layers` finds; ``enabled`` switches
    the whole thing on or off.
    """
    return LayerRecorder(model, out_dir, layers, enabled=enabled)


@final
@dataclass(frozen=True, slots=True)
class LayerPass:
    """One pass over the model."""

    number: int
    phase: Literal["prefill", "decode"]
    tokens: int | None  # along the second axis of the hidden states
    sites: tuple[str, ...]  # of each layer, in order
    folder: Path | None


@final
class LayerRecorder:
    """Made by `record_layers`. A context manager; also closed by `close`."""

    def __init__(
        self,
        model: Any,
        out_dir: str | Path | None = None,
        layers: Sequence[str] | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self.model = model
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.passes: list[LayerPass] = []
        self._selectors = None if layers is None else tuple(layers)
        self._names: LayerNames | None = None
        self._watch: Watch | None = None
        self._handles: list[Any] = []
        self._lock = threading.RLock()  # passes of several threads are taken one after the other
        self._pass: Any = None
        self._cached = 0
        self._started = 0
        self._failed = False
        self._depth = 0
        self._layers: list[Tensor] = []
        self._sites: tuple[str, ...] = ()
        self._closed = False
        if enabled:
            self.enable()

    @property
    def enabled(self) -> bool:
        """Whether passes are recorded."""
        return bool(self._handles)

    @property
    def hidden_states(self) -> list[Tensor]:
        """The layers of the last pass, in any thread."""
        return list(self._layers)

    def enable(self) -> None:
        """Record the passes from now on."""
        if self._closed:
            raise SessionError("this recorder is closed; make a new one to go on")
        if self.enabled:
            return
        if self._watch is None:
            self._watch = self._start()
        if isinstance(self.model, torch.jit.ScriptModule):  # which takes no hooks of this kind
            self._handles = [_Around(self.model, self._begin, self._end)]
        elif isinstance(self.model, nn.Module):
            before = HookWay().before(self.model, self._begin, first=True)
            after = HookWay().after(self.model, self._end, always=True)
            self._handles = [before, after]

    def disable(self) -> None:
        """Record nothing until `enable` is called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Take everything off the model and finish the files."""
        self.disable()
        self._closed = True
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Mark one pass by hand, for things that take no hooks (packaged models, loops around submodules)."""
        if self._watch is None:
            yield
            return
        self._open({})
        try:
            yield
        finally:
            self._close_pass()

    # Setting up.

    def _start(self) -> Watch:
        taps = [tap(selector, keep=Full()) for selector in self._chosen()]
        folder = None if self.out_dir is None else self.out_dir / "run"
        return watch(self.model, folder, taps, sinks=[self])

    def _chosen(self) -> list[str]:
        if self._selectors is not None:
            return list(self._selectors)
        self._names = find_layers(self.model)
        chosen = [site_name(path, "output") for path in self._names.blocks]
        chosen.append(site_name(self._names.blocks[0], "input"))
        if self._names.embedding is not None:
            chosen.append(site_name(self._names.embedding, "output"))
        return [
            selector if parent_path(path_of(selector)) else f"re:{_escaped(selector)}" for selector in chosen
        ]

    # A pass.

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._open(kwargs)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._depth == 0:
            return
        try:
            self._depth -= 1
            if self._depth == 0:
                self._failed = output is None  # torch calls this hook also when the forward raised
                self._close_pass()
        finally:
            self._lock.release()

    def _open(self, kwargs: dict[str, Any]) -> None:
        assert self._watch is not None
        self._cached = _cache_length(kwargs)
        self._failed = False
        self._pass = self._watch.step(self._started)
        self._started += 1
        self._pass.__enter__()

    def _close_pass(self) -> None:
        opened, self._pass = self._pass, None
        if opened is not None:
            opened.__exit__(None, None, None)

    # The sink's side: the watch hands over each finished pass.

    def write(self, record: StepRecord) -> None:
        """Take one pass."""
        sites, layers = self._in_order(record)
        if self._failed or not layers:
            return
        self._sites, self._layers = sites, layers
        hidden = self._layers[-1]
        tokens = int(hidden.shape[1]) if hidden.dim() >= 3 else None
        again = bool(self.passes) and tokens == 1 and self.passes[0].tokens not in (1, None)
        phase: Literal["prefill", "decode"] = "decode" if self._cached > 0 or again else "prefill"
        number = len(self.passes)
        folder = self._folder(number, phase)
        self.passes.append(LayerPass(number, phase, tokens, self._sites, folder))
        _last_pass.layers = list(self._layers)
        if folder is not None:
            write_layers(folder, self._layers, self._metadata(record, phase, tokens))

    def _in_order(self, record: StepRecord) -> tuple[tuple[str, ...], list[Tensor]]:
        """The layers of a record, the embedding first: of each call of each block the first tensor."""
        first: dict[tuple[str, str, int], tuple[str, Tensor]] = {}
        for item in record.tensors:
            site = Site.parse(item.site)
            first.setdefault((site.path, site.kind, site.call), (item.site, item.value))
        if self._names is None:
            return tuple(name for name, _ in first.values()), [value for _, value in first.values()]
        blocks = set(self._names.blocks)
        chosen = [found for (path, kind, _), found in first.items() if path in blocks and kind == "output"]
        entering = first.get((self._names.blocks[0], "input", 0))
        if entering is None and self._names.embedding is not None:
            entering = first.get((self._names.embedding, "output", 0))
        if entering is not None:
            chosen.insert(0, entering)
        return tuple(name for name, _ in chosen), [value for _, value in chosen]

    def _folder(self, number: int, phase: str) -> Path | None:
        if self.out_dir is None:
            return None
        if number == 0:
            return self.out_dir
        if phase == "decode":
            decoded = sum(each.phase == "decode" for each in self.passes)
            return self.out_dir / f"decode_{decoded + 1:04d}"
        return self.out_dir / f"pass_{number:04d}"

    def _metadata(self, record: StepRecord, phase: str, tokens: int | None) -> dict[str, Any]:
        return {
            "model": type(self.model).__name__,
            "layers": len(self._layers) - 1,
            "sites": {f"layer_{n}": site for n, site in enumerate(self._sites)},
            "pass": record.step,
            "phase": phase,
            "tokens": tokens,
            "cached_tokens": self._cached,
            "created": datetime.datetime.fromtimestamp(record.time, datetime.UTC).isoformat(),
            "torch": str(torch.__version__),
        }


@final
class _Around:
    """A forward with something before and after it, kept in the instance, where it hides the real one."""

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
        """The module is as it was found."""
        if self._before is None:
            self._attributes.pop("forward", None)
        else:
            self._attributes["forward"] = self._before


def _cache_length(kwargs: dict[str, Any]) -> int:
    """How many tokens a key-value cache among the arguments already holds."""
    for name in ("past_key_values", "past_key_value", "cache", "kv_cache"):
        cache = kwargs.get(name)
        length = getattr(cache, "get_seq_length", None)
        if callable(length):
            return int(length())
        if isinstance(cache, (tuple, list)) and cache and isinstance(cache[0], (tuple, list)):
            first = cache[0][0]
            return int(first.shape[-2]) if isinstance(first, Tensor) else 0
    return 0


def _escaped(selector: str) -> str:
    """A path without a dot would match at any depth; as an expression it means the top level alone."""
    return re.escape(selector) + r"(\..*)?(#\d+)?"
