"""The part of the vLLM integration that runs in the engine's worker process.

`EngineRecorder` reads the step of a model runner at the model's call: which requests the rows belong to, from the
runner's batch; positions and tokens, from the arguments of the call. It checks each pass: positions of a request must
be consecutive, and tokens of a prompt must be those of the request. A pass that fails is not recorded and is reported.

`WorkerExtension` (``worker_extension_cls=``) offers it to other processes by ``collective_rpc``. Nothing of vLLM is
changed while nothing is recorded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from torchtap.errors import FormError, SessionError
from torchtap.serving.addresses import PassTable, Request, RequestTokens, RowLog, audit
from torchtap.serving.recorder import RowRecorder, outputs_of, wrap
from torchtap.serving.values import write_log, write_request
from torchtap.spi import Hooks, RunWriter, ScalarBlock, SharedFolder, StepRecord, environment

__all__ = ["EngineRecorder", "ServedRecorder", "StepTables", "WorkerExtension", "begin", "end", "external_id"]

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
class StepTables:
    """Follow a model runner, and call ``on_pass(table)`` before each call of the model with the addresses of its rows.

    ``requests`` has every request that was scheduled since; ``on_finished`` is called with each that ended.
    """

    def __init__(
        self,
        runner: Any,
        on_pass: Callable[[PassTable], None],
        on_passed: Callable[[], None],
        on_problem: Callable[[str], None],
        on_finished: Callable[[Request], None] | None = None,
    ) -> None:
        self._runner = runner
        self._on_pass, self._on_passed, self._on_problem = on_pass, on_passed, on_problem
        self._on_finished = on_finished
        self.requests: dict[str, Request] = {}
        self.extra_args: dict[str, dict[str, Any]] = {}
        self._scheduled: dict[str, int] | None = None
        self._batch: Any = None  # of the second model runner
        self._hooks = Hooks(runner.get_model())
        self._hooks.before(runner.get_model(), self._before)
        self._hooks.around(lambda: None, on_passed)
        self._undo = [wrap(runner, "execute_model", self._execute_model)]
        if hasattr(runner, "prepare_inputs"):
            self._undo.append(wrap(runner, "prepare_inputs", self._prepare_inputs))
        for request in getattr(runner, "requests", {}).values():  # those that run already
            self._add(request.req_id, request.prompt_token_ids, request.lora_request, request.mm_features)

    def remove(self) -> None:
        """Leave the runner as it was."""
        self._read_outputs(self.requests, finished=False)
        self._hooks.remove()
        for undo in self._undo:
            undo()

    def _add(self, name: str, prompt: Sequence[int] | None, adapter: Any, media: Any) -> None:
        parent, sample = external_id(name)
        scope = "" if adapter is None else f"adapter {adapter.lora_name}"
        if media:  # tokens do not tell what the values are
            scope += f" media of {name}"
        self.requests[name] = Request(name, list(prompt or ()), scope=scope, parent=parent, sample=sample)

    def _execute_model(self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self.requests:
                self._add(new.req_id, new.prompt_token_ids, new.lora_request, new.mm_features)
                self.extra_args[new.req_id] = dict(getattr(new.sampling_params, "extra_args", None) or {})
        self._read_outputs(scheduled.finished_req_ids, finished=True)
        self._scheduled = scheduled.num_scheduled_tokens
        try:
            return execute(scheduled, *args, **kwargs)
        finally:
            self._scheduled = self._batch = None

    def _prepare_inputs(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._batch = prepare(*args, **kwargs)
        return self._batch

    def _read_outputs(self, names: Any, *, finished: bool) -> None:
        """Read the output tokens of requests while the runner knows them."""
        states = getattr(self._runner, "requests", {})
        for name in names:
            request = self.requests.get(name)
            if request is None or request.finished:
                continue
            if name in states:
                request.output = [int(token) for token in states[name].output_token_ids if token >= 0]
            request.finished = finished
            if finished and self._on_finished is not None:
                self._on_finished(request)

    def _before(self, args: Any, kwargs: Any) -> None:
        if self._scheduled is None:  # a warm-up or a profile, which has no requests
            return
        try:
            table = self._table(kwargs)
            problem = audit(table, self.requests)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            problem = f"the engine's step could not be read: {type(error).__name__}: {error}"
        if problem:
            self._on_problem(problem)
        else:
            self._on_pass(table)

    def _table(self, kwargs: dict[str, Any]) -> PassTable:
        assert self._scheduled is not None
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
class EngineRecorder:
    """Record the chosen sites of every request of one model runner."""

    def __init__(self, runner: Any, sites: Sequence[str], prepared: RowRecorder | None = None) -> None:
        self.log = RowLog()
        self._recorder = (
            RowRecorder(runner.get_model(), sites, log=self.log) if prepared is None else prepared
        )
        self._prepared = prepared
        if prepared is not None:
            prepared.log = self.log
        self._tables = StepTables(runner, self._recorder.begin_pass, self._recorder.end_pass, self._problem)
        self.log.requests = self._tables.requests

    def _problem(self, text: str) -> None:
        self.log.problems[""] = text

    def remove(self) -> RowLog:
        """Stop recording and return what was recorded."""
        self._tables.remove()
        if self._prepared is None:
            self._recorder.remove()
        return self.log


@final
class ServedRecorder:
    """Record for a server: chosen requests, and statistics of every n-th request. One for each worker.

    settings: ``out`` is the folder; ``every`` the period of the statistics, 0 for none; ``budget`` the largest number
    of rows of a request. A request asks by ``torchtap_rows`` and ``torchtap_sites`` in its extra arguments. Nothing
    that goes wrong here reaches the server; it is written to ``problems.json``.
    """

    def __init__(self, runner: Any, recorder: RowRecorder, settings: dict[str, Any]) -> None:
        self.log = recorder.log
        self._recorder = recorder
        self._out = Path(settings["out"])
        self._every, self._budget = int(settings.get("every") or 0), int(settings.get("budget") or 4096)
        self._left: dict[str, int] = {}  # rows that a request may still have; absent: it is not recorded
        self._numbers: dict[str, int] = {}  # of requests whose statistics are taken
        self._count = 0
        self._statistics: RunWriter | None = None
        self._out.mkdir(parents=True, exist_ok=True)
        names = [port.site.name for port in recorder.plan.ports]
        SharedFolder(self._out).put("sites.json", [json.dumps(names).encode()])
        self._tables = StepTables(runner, self._on_pass, recorder.end_pass, self._problem, self._on_finished)

    def _problem(self, text: str) -> None:
        self.log.problems[""] = text
        with suppress(OSError):
            SharedFolder(self._out).put("problems.json", [json.dumps(self.log.problems).encode()])

    def _on_pass(self, table: PassTable) -> None:
        try:
            chosen = {}
            for name, count in zip(table.requests, table.counts, strict=True):
                if name not in self.log.requests:
                    self._meet(name)
                left = self._left.get(name, 0)
                if left > 0:
                    chosen[name] = range(min(left, count))
                    self._left[name] = left - count
            self._recorder.begin_pass(table.only(chosen))
        except Exception as error:
            self._problem(f"{type(error).__name__}: {error}")

    def _meet(self, name: str) -> None:
        """Decide what is recorded of a new request."""
        asked = self._tables.extra_args.get(name, {})
        self.log.requests[name] = self._tables.requests[name]
        if "torchtap_rows" in asked:
            self._left[name] = min(int(asked["torchtap_rows"]), self._budget)
        if self._every and self._count % self._every == 0:
            self._left.setdefault(name, self._budget)
            self._numbers[name] = self._count
        self._count += 1

    def _on_finished(self, request: Request) -> None:
        try:
            if request.id in self._left:
                self._write(request)
        except Exception as error:
            self._problem(f"request {request.id!r}: {type(error).__name__}: {error}")
        self.log.forget(request.id)
        for known in (self._left, self._numbers, self._tables.requests, self._tables.extra_args):
            known.pop(request.id, None)

    def _write(self, request: Request) -> None:
        values = self.log.of_request(request.id)
        if self._left[request.id] <= 0:
            last = max(values.positions, default=-1)
            over = dict.fromkeys(range(last + 1, len(values.tokens) - 1), "over the budget of the request")
            values.missing.update(over)
        if request.id in self._numbers:
            self._add_statistics(self._numbers[request.id], values)
        asked = self._tables.extra_args.get(request.id, {})
        if "torchtap_rows" in asked:
            sites = asked.get("torchtap_sites") or list(values)
            write_request(self._out, values.only(sites))

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

    def remove(self) -> None:
        """Stop recording."""
        self._tables.remove()
        if self._statistics is not None:
            self._statistics.close()


def begin(worker: Any, sites: Sequence[str]) -> list[str]:
    """Start recording on a worker; return the names of the sites."""
    check_version()
    runner = worker.model_runner
    if getattr(worker, "_torchtap_served", None) is not None:
        raise SessionError(
            "this engine records for its server: read the folder of the server, or start it without"
        )
    if getattr(worker, "_torchtap", None) is not None:
        raise SessionError("this engine is being recorded already: leave that capture first")
    prepared = prepared_for(worker, sites)
    worker._torchtap = EngineRecorder(runner, sites, prepared)
    recorder: RowRecorder = worker._torchtap._recorder
    return [port.site.name for port in recorder.plan.ports]


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


def end(worker: Any, folder: str | None = None) -> Any:
    """Stop recording. Return the log, or write it to a folder and return its path."""
    recorder: EngineRecorder | None = getattr(worker, "_torchtap", None)
    if recorder is None:
        raise SessionError("nothing is being recorded in this engine")
    worker._torchtap = None
    log = recorder.remove()
    if folder is None:
        return log
    if worker.rank == 0:
        write_log(Path(folder), log)
    return folder


class WorkerExtension:
    """Give vLLM's workers the methods that `torchtap.serving.capture` calls in other processes."""

    def torchtap_begin(self, sites: list[str]) -> list[str]:
        """Start recording."""
        return begin(self, sites)

    def torchtap_end(self, folder: str) -> str:
        """Stop recording and write what was recorded."""
        return str(end(self, folder))
