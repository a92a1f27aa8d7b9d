"""`torchtap.serving.capture`: record chosen sites inside an engine for the length of a block."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchtap.errors import FormError
from torchtap.serving.recorder import RowRecorder
from torchtap.serving.transformers_engine import TransformersEngine
from torchtap.serving.values import ServedRun, ServedValues

__all__ = ["capture", "is_model", "worker_here"]

_WORKER = "torchtap.serving.vllm_tap_worker.TapWorker"
_EXTENSION = "torchtap.serving.vllm_worker.WorkerExtension"


@contextmanager
def capture(engine: Any, *sites: str) -> Iterator[ServedValues]:
    """Record sites inside a serving engine, each row with its request and position.

        with serving.capture(llm, "model.layers.*:output") as seen:
            outputs = llm.generate(prompts)
        seen.of_request(outputs[0].request_id)["model.layers.3:output"]    # [tokens, width]

    engine: a ``vllm.LLM``, or a model of transformers (``generate``, ``generate_batch``, or called directly).
    sites: selectors of module outputs; every layer by default.

    Returns a context manager that gives a `ServedValues`. Raises `FormError` if the engine's version is not known, or
    if vLLM compiled the model without taps, and `SelectionError` if a selector matches nothing.
    """
    chosen, seen = list(sites or ("**.layers.*:output",)), ServedValues()
    if is_model(engine):
        recorder = RowRecorder(engine, chosen)
        followed = TransformersEngine(engine, recorder)
        try:
            yield seen
        finally:
            followed.remove()
            seen.fill(recorder.log)
        return
    from torchtap.serving import vllm_worker

    vllm_worker.check_version()
    worker = worker_here(engine)
    if worker is not None:
        log = vllm_worker.begin(worker, chosen)
        try:
            yield seen
        finally:
            vllm_worker.end(worker)
            seen.fill(log)
        return
    config = engine.llm_engine.vllm_config.parallel_config
    if config.worker_extension_cls != _EXTENSION and config.worker_cls != _WORKER:
        raise FormError(
            "this engine runs in other processes, and its workers have no taps: start it with "
            f"LLM(..., worker_extension_cls={_EXTENSION!r}), or in this process with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    engine.collective_rpc("torchtap_begin", args=(chosen,))
    folder = tempfile.mkdtemp(prefix="torchtap-serving-")
    weakref.finalize(seen, shutil.rmtree, folder, ignore_errors=True)
    try:
        yield seen
    finally:
        engine.collective_rpc("torchtap_end", args=(folder,))
        seen.fill(ServedRun(folder))


def is_model(engine: Any) -> bool:
    """Return True for a model of transformers, False for vLLM; refuse anything else."""
    if isinstance(engine, nn.Module) and hasattr(engine, "generate"):
        return True
    if hasattr(engine, "collective_rpc") and not isinstance(engine, nn.Module):
        return False
    raise FormError(
        f"{type(engine).__name__} is no engine that torchtap knows: give vllm.LLM, or a model of transformers with "
        "generate()"
    )


def worker_here(engine: Any) -> Any:
    """Return the worker of a vLLM engine that runs in this process; None if it runs in others."""
    core = engine.llm_engine.engine_core
    executor: Any = getattr(getattr(core, "engine_core", None), "model_executor", None)
    if not hasattr(executor, "driver_worker") or hasattr(executor, "workers"):
        return None
    return executor.driver_worker.worker
