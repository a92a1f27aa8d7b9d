"""Change values of chosen requests and tokens inside an engine.

    with serving.steer(llm, {"model.layers.3:output": lambda rows: rows + vector}, requests=["7"], tokens="generated"):
        llm.generate(prompts)

It guarantees that rows of other requests and positions stay bit-identical. A function gets the rows to change,
``[rows, width]``, and returns them changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from torchtap.errors import FormError, PlanError
from torchtap.serving.addresses import PassTable, Request
from torchtap.serving.engine_capture import is_model, worker_here
from torchtap.serving.recorder import FollowedEngine, RowVisitor
from torchtap.serving.transformers_engine import TransformersEngine

__all__ = ["Steering", "steer"]

Rows = Callable[[Tensor], Tensor]
Tokens = range | slice | Literal["prompt", "generated"] | None


def steer(
    engine: Any,
    changes: Mapping[str, Rows],
    *,
    requests: Collection[str] | None = None,
    tokens: Tokens = None,
    shared_cache: bool = False,
) -> AbstractContextManager[Steering]:
    """Change the outputs of modules for some requests and tokens, for the length of a block.

    engine: a ``vllm.LLM`` in this process that runs eagerly, or a model of transformers.
    changes: for each selector a function of the rows, ``[rows, width]``, that returns as many.
    requests: ids; all by default.
    tokens: a range or slice of positions, ``"prompt"`` or ``"generated"``; all by default.
    shared_cache: allow it with a prefix cache. Keys and values of steered tokens then reach each later request with the
        same prompt, unless every steered request has a ``cache_salt`` of its own.

    Raises `FormError` for a compiled or remote engine, and `PlanError` for a prefix cache without ``shared_cache``.
    """
    if not changes or not all(map(callable, changes.values())):
        raise PlanError(
            "steering needs functions, e.g. {'model.layers.3:output': lambda rows: rows + vector}"
        )
    return _steer(engine, changes, requests, tokens, shared_cache)


@contextmanager
def _steer(
    engine: Any, changes: Mapping[str, Rows], requests: Any, tokens: Tokens, shared_cache: bool
) -> Iterator[Steering]:
    runner = None if is_model(engine) else _runner(engine, shared_cache)
    steering = Steering(engine if runner is None else runner.get_model(), changes, requests, tokens)
    followed: FollowedEngine
    if runner is None:
        followed = TransformersEngine(engine, steering)
    else:
        from torchtap.serving.vllm_worker import VllmEngine

        followed = VllmEngine(runner, steering)
    try:
        yield steering
    finally:
        followed.remove()


def _runner(engine: Any, shared_cache: bool) -> Any:
    """Return the model runner of a vLLM engine that can be steered."""
    from torchtap.serving.vllm_worker import check_version

    check_version()
    worker, config = worker_here(engine), engine.llm_engine.vllm_config
    if worker is None:
        raise FormError(
            "functions cannot be sent to the workers of this engine: start it with VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    if config.compilation_config.mode:
        raise FormError(
            "vLLM compiled this model, and a graph cannot be steered: start it with enforce_eager=True"
        )
    if config.cache_config.enable_prefix_caching and not shared_cache:
        raise PlanError(
            "this engine has a prefix cache, which would hand keys and values of steered tokens to other requests: "
            "start it with enable_prefix_caching=False, or give every steered request a cache_salt and say "
            "shared_cache=True"
        )
    return worker.model_runner


@final
class Steering(RowVisitor):
    """Made by `steer`. ``applied`` counts the rows that were changed, for each request by your id."""

    def __init__(self, model: nn.Module, changes: Mapping[str, Rows], chosen: Any, tokens: Tokens) -> None:
        self.applied: dict[str, int] = {}
        self._changes = list(changes.values())
        self._chosen, self._tokens = chosen, tokens
        self._table: PassTable | None = None
        super().__init__(model, list(changes))

    def begin_pass(self, table: PassTable) -> None:
        kept: dict[str, list[int]] = {}
        for name, run in table.runs():
            request = self.requests[name]
            positions = table.positions[run].tolist()
            if positions and (self._chosen is None or any(map(request.is_called, self._chosen))):
                kept[name] = self._positions(request, positions)
        self._table = table.only(kept)
        for name, count in zip(self._table.requests, self._table.counts, strict=True):
            label = self.requests[name].label
            self.applied[label] = self.applied.get(label, 0) + count

    def end_pass(self) -> None:
        self._table = None

    def _positions(self, request: Request, positions: list[int]) -> list[int]:
        """Return where the positions to change are among those of a pass."""
        every, size = range(1 << 62), len(request.prompt)
        named = {None: every, "prompt": every[:size], "generated": every[size:]}
        if isinstance(self._tokens, slice):
            wanted = every[self._tokens]
        else:
            wanted = self._tokens if isinstance(self._tokens, range) else named[self._tokens]
        return [at for at, position in enumerate(positions) if position in wanted]

    def hook(self, index: int, fused: bool) -> Callable[[Any], Any]:
        def hook(output: Any) -> Any:
            table = self._table
            if table is None or not table.counts:
                return None
            pair = fused and isinstance(output, tuple) and len(output) == 2
            first = output[0] if isinstance(output, tuple) else output
            value = first + output[1] if pair else first
            if tuple(value.shape[: len(table.shape)]) != table.shape:
                raise PlanError(f"{self.plan.ports[index].site.name} does not have one row for each token")
            changed = self._changed(index, table, value)
            if pair:
                changed = torch.where((changed == value).all(-1, keepdim=True), first, changed - output[1])
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _changed(self, index: int, table: PassTable, value: Tensor) -> Tensor:
        flat = value.flatten(0, len(table.shape) - 1).clone()
        at = table.index
        assert at is not None
        rows = flat[at]
        for tap in self.plan.ports[index].taps:
            made = self._changes[tap](rows)
            if not isinstance(made, Tensor) or made.shape != rows.shape:
                raise PlanError(f"a change must return rows of shape {tuple(rows.shape)}")
            rows = made
        flat[at] = rows.to(flat.dtype)
        return flat.view(value.shape)
