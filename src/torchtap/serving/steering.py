"""Change values of chosen requests and tokens inside an engine.

    with serving.steer(llm, {"model.layers.3:output": lambda rows: rows + vector}, requests=["7"], tokens="generated"):
        llm.generate(prompts)

It guarantees that rows of other requests and positions stay bit-identical. A function gets the rows to change,
``[rows, width]``, and returns them changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from torchtap.errors import FormError, PlanError
from torchtap.serving.addresses import PassTable, Request
from torchtap.serving.engine_capture import in_process
from torchtap.serving.recorder import RowVisitor

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
) -> Steering:
    """Change the outputs of modules for some requests and tokens, for the length of a block.

    engine: a ``vllm.LLM`` in this process that runs eagerly, or a model of transformers.
    changes: for each selector a function of the rows, ``[rows, width]``, that returns as many.
    requests: ids; all by default.
    tokens: a range or slice of positions, ``"prompt"`` or ``"generated"``; all by default.
    shared_cache: allow it with a prefix cache. Keys and values of steered tokens then reach each later request with the
        same prompt, unless every steered request has a ``cache_salt`` of its own.

    Raises `FormError` for a compiled or remote engine, and `PlanError` for a prefix cache without ``shared_cache``.
    """
    return Steering(engine, changes, requests, tokens, shared_cache)


@final
class Steering:
    """Made by `steer`. ``applied`` counts the rows that were changed, for each request by your id."""

    def __init__(
        self, engine: Any, changes: Mapping[str, Rows], requests: Any, tokens: Tokens, shared_cache: bool
    ) -> None:
        if not changes or not all(map(callable, changes.values())):
            raise PlanError(
                "steering needs functions, e.g. {'model.layers.3:output': lambda rows: rows + vector}"
            )
        self._engine, self._changes = engine, dict(changes)
        self._requests, self._tokens, self._shared = requests, tokens, shared_cache
        self._attached: Any = None
        self.applied: dict[str, int] = {}

    def __enter__(self) -> Self:
        if isinstance(self._engine, nn.Module):
            from torchtap.serving.transformers_engine import GenerationRecorder

            visitor = self._visitor(self._engine)
            self._attached = GenerationRecorder(self._engine, [*self._changes], visitor)
        else:
            self._attached = self._attach_vllm()
        return self

    def _visitor(self, model: nn.Module) -> _RowChanger:
        return _RowChanger(model, self._changes, self._requests, self._tokens, self.applied)

    def _attach_vllm(self) -> Any:
        from torchtap.serving.vllm_worker import StepTables, check_version

        check_version()
        if not in_process(self._engine):
            raise FormError(
                "functions cannot be sent to the workers of this engine: start it with VLLM_ENABLE_V1_MULTIPROCESSING=0"
            )
        config = self._engine.llm_engine.vllm_config
        if config.compilation_config.mode:
            raise FormError(
                "vLLM compiled this model, and a graph cannot be steered: start it with enforce_eager=True"
            )
        if config.cache_config.enable_prefix_caching and not self._shared:
            raise PlanError(
                "this engine has a prefix cache, which would hand keys and values of steered tokens to other requests: "
                "start it with enable_prefix_caching=False, or give every steered request a cache_salt and say "
                "shared_cache=True"
            )

        def attach(wrapper: Any) -> _Attached:
            runner = wrapper.worker.model_runner
            visitor = self._visitor(runner.get_model())
            tables = StepTables(runner, visitor.begin_pass, visitor.end_pass, lambda _: visitor.end_pass())
            visitor.requests = tables.requests
            return _Attached(tables, visitor)

        return self._engine.collective_rpc(attach)[0]

    def __exit__(self, *_: object) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.remove()


@final
class _Attached:
    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def remove(self) -> None:
        for part in self._parts:
            part.remove()


@final
class _RowChanger(RowVisitor):
    """Replace the chosen rows of each output."""

    def __init__(
        self,
        model: nn.Module,
        changes: Mapping[str, Rows],
        chosen: Any,
        tokens: Tokens,
        applied: dict[str, int],
    ) -> None:
        self.requests: Mapping[str, Request] = {}
        self._changes = list(changes.values())
        self._chosen, self._tokens, self._applied = chosen, tokens, applied
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
            self._applied[label] = self._applied.get(label, 0) + count

    def end_pass(self) -> None:
        self._table = None

    def _positions(self, request: Request, positions: list[int]) -> list[int]:
        """Return where the positions to change are among those of a pass."""
        size = len(request.prompt)
        match self._tokens:
            case None:
                wanted: Any = range(1 << 62)
            case "prompt":
                wanted = range(size)
            case "generated":
                wanted = range(size, 1 << 62)
            case slice() as part:
                wanted = range(part.start or 0, 1 << 62 if part.stop is None else part.stop, part.step or 1)
            case _:
                wanted = self._tokens
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
