"""Record the hidden states of a model, layer by layer and pass by pass, without touching its code.

    with tt.record_layers(model, out_dir="layers") as recorder:
        model(**inputs)
    hidden_states = tt.get_layer_hidden_states()

Layer 0 is what enters the first block (the embedding's output, with whatever the model adds to it); layer N is what the
N-th block returns, before a final norm that the model may have: Hugging Face's ``hidden_states[-1]`` is after it. It
guarantees:
- the model's signature and results stay as they are;
- switched off, the model carries nothing of the recorder;
- each thread sees the layers of its own last pass;
- with ``out_dir`` a pass is on disk when the model returns, and only the last one is in memory.

The run is in ``out_dir/run``, the files for each layer (`files`) in ``out_dir``: those of the first pass, and
a folder for each later one (``decode_0001`` ... in generation with a cache, else ``pass_0001`` ...).
"""

from __future__ import annotations

import datetime
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from torchtap._torch import TORCH_VERSION
from torchtap.comparison.recordings import is_layer_folder
from torchtap.errors import OutputError, SessionError
from torchtap.forms.attach import form_of
from torchtap.hooks.arguments import Args, Kwargs
from torchtap.hooks.ways import HookWay
from torchtap.monitors.layers.copies import BlockCopies
from torchtap.monitors.layers.files import write_layers
from torchtap.monitors.layers.names import final_norm
from torchtap.monitors.layers.numbering import ChosenLayers
from torchtap.plan.tap import tap
from torchtap.reduce import Full
from torchtap.session.front import watch
from torchtap.session.watching import Watch
from torchtap.store.record import StepRecord

__all__ = ["LayerPass", "LayerRecorder", "get_layer_hidden_states", "record_layers"]

_last_pass = threading.local()


def get_layer_hidden_states() -> list[Tensor] | None:
    """The layers of the last pass that a recorder saw in this thread; ``None`` when there was none."""
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

    ``layers`` are indices of blocks (``[0, 30, 61]``; ``"embedding"`` for what enters them), or selectors of what to
    record in their place; each keeps the number that it has among all layers. ``enabled`` switches the whole thing on
    or off, and so does ``record_layer_outputs``.
    """
    on = enabled if record_layer_outputs is None else record_layer_outputs
    return LayerRecorder(model, out_dir, layers, enabled=on)


@final
@dataclass(frozen=True, slots=True)
class LayerPass:
    """One pass over the model."""

    number: int
    phase: Literal["prefill", "decode"]
    tokens: int | None  # along the second axis of the hidden states
    sites: tuple[str, ...]  # of each layer, in order
    layers: tuple[int, ...]  # the number of each: 0 is what enters the blocks, N what the N-th returns
    folder: Path | None


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
        self._asked = layers
        self._chosen: ChosenLayers | None = None
        self._copies: BlockCopies | None = None  # one of the two takes the values
        self._watch: Watch | None = None
        self._handles: list[Any] = []
        self._lock = threading.RLock()  # passes of several threads are taken one after the other
        self._pass: Any = None
        self._cached = 0
        self._started = 0
        self._failed = False
        self._depth = 0
        self._layers: list[Tensor] = []
        self._arrived: list[str] = []  # sites of the last pass, and what they mean
        self._positions: list[int] = []
        self._sites: tuple[str, ...] = ()
        self._numbers: tuple[int, ...] = ()
        self._final_norm: str | None = None
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
        if self._chosen is None:
            self._start()
        if self._copies is not None:
            self._copies.put_on()
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
        if self._copies is not None:
            self._copies.take_off()

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
        if self._chosen is None:
            yield
            return
        self._open({})
        try:
            yield
        finally:
            self._close_pass()

    # Setting up.

    def _start(self) -> None:
        if self.out_dir is not None and is_layer_folder(self.out_dir):
            raise OutputError(
                f"{self.out_dir} already holds a recording of layers: give another folder, or delete this one first"
            )
        self._chosen = chosen = ChosenLayers(self.model, self._asked)
        self._final_norm = None if chosen.names is None else final_norm(self.model, chosen.names)
        if self.out_dir is None and chosen.are_blocks and form_of(self.model) == "eager":
            self._copies = BlockCopies(self.model, chosen)
            return
        taps = [tap(selector, keep=Full()) for selector in chosen.selectors()]
        folder = None if self.out_dir is None else self.out_dir / "run"
        self._watch = watch(self.model, folder, taps, sinks=[self])

    # A pass.

    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._open(kwargs)

    def _end(self, module: nn.Module, args: Args, output: Any) -> None:
        if self._depth == 0:
            return
        try:
            self._depth -= 1
            if self._depth == 0:
                self._failed = output is None  # torch calls this hook also when the forward raised
                self._close_pass()
        finally:
            self._lock.release()

    def _open(self, kwargs: Kwargs) -> None:
        self._cached = _cache_length(kwargs)
        self._failed = False
        if self._copies is not None:
            # What the last pass left is let go of first: its memory serves this one, and there is one set at a time.
            self._layers, _last_pass.layers = [], None
            self._copies.begin()
        elif self._watch is not None:
            self._pass = self._watch.step(self._started)
            self._pass.__enter__()
        self._started += 1

    def _close_pass(self) -> None:
        if self._copies is not None:
            self._take(*self._copies.end(), self._started - 1, time.time())
            return
        opened, self._pass = self._pass, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def write(self, record: StepRecord) -> None:
        """Take one pass from the watch, whose sink this is."""
        sites = [item.site for item in record.tensors]
        self._take(sites, [item.value for item in record.tensors], record.step, record.time)

    def _take(self, sites: list[str], values: list[Tensor], step: int, at: float) -> None:
        if self._failed:
            return
        if not sites:
            warnings.warn(
                "a pass brought no layer; was the model compiled after record_layers? Give it the compiled model",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._learn(sites)
        self._layers = [values[position] for position in self._positions]
        if not self._layers:
            return
        tokens = _tokens(self._layers[-1])
        phase = self._phase(tokens)
        number = len(self.passes)
        folder = self._folder(number, phase)
        self.passes.append(LayerPass(number, phase, tokens, self._sites, self._numbers, folder))
        _last_pass.layers = list(self._layers)
        if folder is not None:
            numbered = dict(zip(self._numbers, self._layers, strict=True))
            write_layers(folder, numbered, self._metadata(step, at, phase, tokens))

    def _phase(self, tokens: int | None) -> Literal["prefill", "decode"]:
        """A pass with a cache, or of one token after a longer one, decodes."""
        again = bool(self.passes) and tokens == 1 and self.passes[0].tokens not in (1, None)
        return "decode" if self._cached > 0 or again else "prefill"

    def _learn(self, sites: list[str]) -> None:
        """Which of the sites are layers, and their numbers. From one pass to the next this seldom changes."""
        if sites == self._arrived or self._chosen is None:
            return
        self._arrived = sites
        self._positions = self._chosen.in_order(sites)
        self._sites = tuple(sites[position] for position in self._positions)
        self._numbers = self._chosen.numbers(self._sites)

    def _folder(self, number: int, phase: str) -> Path | None:
        if self.out_dir is None:
            return None
        if number == 0:
            return self.out_dir
        if phase == "decode":
            decoded = sum(each.phase == "decode" for each in self.passes)
            return self.out_dir / f"decode_{decoded + 1:04d}"
        return self.out_dir / f"pass_{number:04d}"

    def _metadata(self, step: int, at: float, phase: str, tokens: int | None) -> dict[str, Any]:
        names = self._chosen.names if self._chosen is not None else None
        return {
            "model": type(self.model).__name__,
            "layers": sum(number > 0 for number in self._numbers),
            "blocks": None if names is None else len(names.blocks),
            "sites": {f"layer_{n}": site for n, site in zip(self._numbers, self._sites, strict=True)},
            "final_norm": self._final_norm,  # which the last layer has not gone through
            "pass": step,
            "phase": phase,
            "tokens": tokens,
            "cached_tokens": self._cached,
            "created": datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(),
            "torch": TORCH_VERSION,
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


def _cache_length(kwargs: Kwargs) -> int:
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


def _tokens(hidden: Tensor) -> int | None:
    return int(hidden.shape[1]) if hidden.dim() >= 3 else None
