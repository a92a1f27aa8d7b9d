"""The part of the vLLM integration that runs in the engine's worker process.

`VllmEngine` reads the step of a model runner at the model's call: which requests the rows belong to, from the
runner's batch; positions and tokens, from the arguments of the call.

`WorkerExtension` (``worker_extension_cls=``) offers it to other processes by ``collective_rpc``. Nothing of vLLM is
changed while nothing is recorded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from torchtap.errors import FormError, SessionError
from torchtap.serving.addresses import PassTable, Request, RequestTokens, RowLog
from torchtap.serving.recorder import FollowedEngine, RowRecorder, RowVisitor, outputs_of
from torchtap.serving.values import ServedValues, write_request
from torchtap.spi import RunWriter, ScalarBlock, SharedFolder, StepRecord, environment

__all__ = ["ServedRecorder", "VllmEngine", "WorkerExtension", "begin", "check_version", "end", "external_id"]

SUPPORTED = ("0.32",)
_STATISTICS = ("mean", "std", "absmax", "rms")
_INTERNAL = re.compile(r"(?:(\d+)_)?(.*)-[0-9a-f]{8}", re.DOTALL)


def check_version() -> None:
    """Refuse a vLLM that was not tested: the tables are read from inside it."""
    import vllm

    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{each}." for each in SUPPORTED)):
        raise FormError(
            f"this is vLLM {version}; request addresses are read from inside the engine, and torchtap knows "
            f"vLLM {', '.join(SUPPORTED)}: install vllm=={SUPPORTED[-1]}.*"
        )


def external_id(internal: str) -> tuple[str, int | None]:
    """Return the user's id of an engine's request, and the number of the sample if it has several.

    vLLM appends eight random digits to each id, and puts ``0_``, ``1_`` … before it if ``n > 1``.
    """
    found = _INTERNAL.fullmatch(internal)
    if found is None:
        return internal, None
    return found[2], None if found[1] is None else int(found[1])


@final
class VllmEngine(FollowedEngine):
    """Follow a model runner."""

    def __init__(self, runner: Any, visitor: RowVisitor) -> None:
        super().__init__(runner.get_model(), visitor)
        self._runner = runner
        self._scheduled: dict[str, int] | None = None
        self._batch: Any = None  # of the second model runner
        self.wrap(runner, "execute_model", self._execute_model)
        if hasattr(runner, "prepare_inputs"):
            self.wrap(runner, "prepare_inputs", self._prepare_inputs)
        for request in getattr(runner, "requests", {}).values():  # those that run already
            self._add(request)

    def _add(self, new: Any) -> None:
        parent, sample = external_id(new.req_id)
        scope = "" if new.lora_request is None else f"adapter {new.lora_request.lora_name}"
        if new.mm_features:  # tokens do not tell what the values are
            scope += f" media of {new.req_id}"
        extra = getattr(new.sampling_params, "extra_args", None) or {}
        self.requests[new.req_id] = Request(
            new.req_id,
            list(new.prompt_token_ids or ()),
            scope=scope,
            parent=parent,
            sample=sample,
            asked={key: value for key, value in extra.items() if key.startswith("torchtap_")},
        )

    def _execute_model(self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self.requests:
                self._add(new)
        self._read(scheduled.finished_req_ids, finished=True)
        self._scheduled = scheduled.num_scheduled_tokens
        try:
            return execute(scheduled, *args, **kwargs)
        finally:
            self._scheduled = self._batch = None

    def _prepare_inputs(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._batch = prepare(*args, **kwargs)
        return self._batch

    def read_outputs(self) -> None:
        self._read(self.requests, finished=False)

    def _read(self, names: Iterable[str], *, finished: bool) -> None:
        """Read the output tokens of requests while the runner knows them."""
        states = getattr(self._runner, "requests", {})
        for name in names:
            request = self.requests.get(name)
            if request is None or request.finished:
                continue
            if name in states:
                request.output = [int(token) for token in states[name].output_token_ids if token >= 0]
            request.finished = finished
            if finished:
                self._visitor.finished(request)

    def table(self, args: Any, kwargs: dict[str, Any]) -> PassTable | None:
        if self._scheduled is None:  # a warm-up or a profile, which has no requests
            return None
        batch = self._runner.input_batch if self._batch is None else self._batch
        names = tuple(batch.req_ids[: batch.num_reqs])
        if self._batch is None:
            counts = tuple(self._scheduled[name] for name in names)
        else:
            starts = batch.query_start_loc_np[: len(names) + 1].tolist()
            counts = tuple(end - start for start, end in pairwise(starts))
        total = sum(counts)
        given, positions = kwargs.get("input_ids"), kwargs["positions"]
        tokens = torch.full((total,), -1) if given is None else given[:total].to("cpu", torch.long, copy=True)
        if (
            positions.dim() != 1
        ):  # of several axes, as for images: the place in the sequence is not among them
            before = batch.num_computed_tokens_cpu[: len(names)].tolist()
            at = torch.cat([torch.arange(n) + start for n, start in zip(counts, before, strict=True)])
        else:
            at = positions[:total].to("cpu", torch.long, copy=True)
        return PassTable((int(positions.shape[-1]),), names, counts, at, tokens)


@final
class ServedRecorder(RowRecorder):
    """Record for a server: chosen requests, and statistics of every n-th request. One for each worker.

    settings: ``out`` is the folder; ``every`` the period of the statistics, 0 for none; ``budget`` the largest number
    of rows of a request. A request asks by ``torchtap_rows`` and ``torchtap_sites`` in its extra arguments. Nothing
    that goes wrong here reaches the server; it is written to ``problems.json``.
    """

    def __init__(self, model: nn.Module, sites: Sequence[str], settings: dict[str, Any]) -> None:
        super().__init__(model, sites, in_graph=True)
        self._out = Path(settings["out"])
        self._every, self._budget = int(settings.get("every") or 0), int(settings.get("budget") or 4096)
        self._left: dict[str, int] = {}  # rows that a request may still have
        self._recorded: set[str] = set()
        self._numbers: dict[str, int] = {}  # of requests whose statistics are taken
        self._count = 0
        self._statistics: RunWriter | None = None
        self._out.mkdir(parents=True, exist_ok=True)
        names = [port.site.name for port in self.plan.ports]
        SharedFolder(self._out).put("sites.json", [json.dumps(names).encode()])

    def report(self, problem: str) -> None:
        super().report(problem)
        with suppress(OSError):
            SharedFolder(self._out).put("problems.json", [json.dumps(self.log.problems).encode()])

    def begin_pass(self, table: PassTable) -> None:
        try:
            chosen = {}
            for name, count in zip(table.requests, table.counts, strict=True):
                if name not in self._left:
                    self._meet(self.requests[name])
                chosen[name] = range(max(min(self._left[name], count), 0))
                self._left[name] -= count
            super().begin_pass(table.only(chosen))
        except Exception as error:
            self.report(f"{type(error).__name__}: {error}")

    def _meet(self, request: Request) -> None:
        """Decide what is recorded of a new request."""
        counted = bool(self._every) and self._count % self._every == 0
        if counted:
            self._numbers[request.id] = self._count
        if counted or "torchtap_rows" in request.asked:
            self._recorded.add(request.id)
        rows = int(request.asked.get("torchtap_rows", self._budget if counted else 0))
        self._left[request.id] = min(rows, self._budget)
        self._count += 1

    def finished(self, request: Request) -> None:
        try:
            if request.id in self._recorded:
                self._write(request)
        except Exception as error:
            self.report(f"request {request.id!r}: {type(error).__name__}: {error}")
        self.log.forget(request.id)
        self._recorded.discard(request.id)
        for known in (self._left, self._numbers):
            known.pop(request.id, None)

    def _write(self, request: Request) -> None:
        values = self.log.of_request(request.id)
        if self._left[request.id] <= 0:
            last = max(values.positions, default=-1)
            over = dict.fromkeys(range(last + 1, len(values.tokens) - 1), "over the budget of the request")
            values.missing.update(over)
        if request.id in self._numbers:
            self._add_statistics(self._numbers[request.id], values)
        if "torchtap_rows" in request.asked:
            write_request(self._out, values, request.asked.get("torchtap_sites"))

    def _add_statistics(self, number: int, values: RequestTokens) -> None:
        """Write the statistics of one request as a step of the run ``statistics``: step n is the n-th request."""
        if self._statistics is None:
            manifest = {"environment": environment(), "labels": {"steps": "requests"}}
            self._statistics = RunWriter(self._out / "statistics", manifest=manifest)
        rows = [value.double() for value in values.values()]
        grid = [[each.mean(), each.std(), each.abs().max(), each.square().mean().sqrt()] for each in rows]
        block = ScalarBlock(tuple(values), _STATISTICS, np.array(grid, dtype=np.float64))
        self._statistics.write(StepRecord(number, None, None, "eval", time.time(), (block,), ()))
        self._statistics.flush()


def begin(worker: Any, sites: Sequence[str]) -> RowLog:
    """Start recording on a worker; return the log that is filled."""
    check_version()
    prepared = getattr(worker, "_torchtap_graph", None)
    if isinstance(prepared, ServedRecorder):
        raise SessionError(
            "this engine records for its server: read the folder of the server, or start it without"
        )
    if getattr(worker, "_torchtap", None) is not None:
        raise SessionError("this engine is being recorded already: leave that capture first")
    model = worker.model_runner.get_model()
    recorder = prepared_for(worker, sites) or RowRecorder(model, sites)
    worker._torchtap = VllmEngine(worker.model_runner, recorder)
    return recorder.log


def prepared_for(worker: Any, sites: Sequence[str]) -> RowRecorder | None:
    """Return the recorder whose ops are in the compiled graph; None for an eager model."""
    from vllm.config import CompilationMode

    prepared: RowRecorder | None = getattr(worker, "_torchtap_graph", None)
    if worker.vllm_config.compilation_config.mode == CompilationMode.NONE:
        return None
    start = (
        "worker_cls='torchtap.serving.vllm_tap_worker.TapWorker', additional_config={'torchtap': {'sites': "
        f"{list(sites)!r}}}}}"
    )
    if prepared is None:
        raise FormError(
            "vLLM compiled this model when the engine started, before any tap: hooks on its layers never run. Start "
            f"the engine with {start}, so that the taps are in the compiled graph, or with enforce_eager=True"
        )
    there = {port.site.name for port in prepared.plan.ports}
    model: nn.Module = worker.model_runner.get_model()
    absent = [port.site.name for port in outputs_of(model, sites).ports if port.site.name not in there]
    if absent:
        raise FormError(
            f"{absent[0]} is not in the graph that vLLM compiled when the engine started; {len(there)} other sites "
            f"are. Start the engine with {start}"
        )
    return prepared


def end(worker: Any) -> None:
    """Stop recording."""
    if getattr(worker, "_torchtap", None) is None:
        raise SessionError("nothing is being recorded in this engine")
    followed, worker._torchtap = worker._torchtap, None
    followed.remove()


class WorkerExtension:
    """Give vLLM's workers the methods that `torchtap.serving.capture` calls in other processes."""

    def torchtap_begin(self, sites: list[str]) -> None:
        """Start recording."""
        self._torchtap_log = begin(self, sites)

    def torchtap_end(self, folder: str) -> None:
        """Stop recording and write what was recorded."""
        end(self)
        if self.rank == 0:  # type: ignore[attr-defined]
            seen = ServedValues()
            seen.fill(self._torchtap_log)
            seen.save(folder)
        del self._torchtap_log
