"""`torchtap.serving.capture`: record chosen sites inside an engine for the length of a block."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from torchtap.errors import FormError
from torchtap.serving.values import ServedRun, ServedValues

__all__ = ["EngineCapture", "capture"]

_WORKER = "torchtap.serving.vllm_tap_worker.TapWorker"
_EXTENSION = "torchtap.serving.vllm_worker.WorkerExtension"


def capture(engine: Any, *sites: str) -> EngineCapture:
    """Record sites inside a serving engine, each row with its request and position.

        with serving.capture(llm, "model.layers.*:output") as seen:
            outputs = llm.generate(prompts)
        seen.of_request(outputs[0].request_id)["model.layers.3:output"]    # [tokens, width]

    engine: a ``vllm.LLM``, or a model of transformers (``generate``, ``generate_batch``, or called directly).
    sites: selectors of module outputs; every layer by default.

    Returns a context manager that gives a `ServedValues`. Raises `FormError` if the engine's version is not known, or
    if vLLM compiled the model without taps, and `SelectionError` if a selector matches nothing.
    """
    return EngineCapture(engine, sites or ("**.layers.*:output",))


@final
class EngineCapture:
    """Made by `capture`."""

    def __init__(self, engine: Any, sites: tuple[str, ...]) -> None:
        self._engine, self._sites = engine, list(sites)
        self._stop: Callable[[], Any] | None = None
        self.seen = ServedValues()

    def __enter__(self) -> ServedValues:
        if isinstance(self._engine, nn.Module) or not hasattr(self._engine, "collective_rpc"):
            from torchtap.serving.transformers_engine import GenerationRecorder

            self._stop = GenerationRecorder(self._engine, self._sites).remove
        else:
            self._stop = self._begin_vllm()
        return self.seen

    def _begin_vllm(self) -> Callable[[], Any]:
        from torchtap.serving import vllm_worker

        vllm_worker.check_version()
        call, sites = self._engine.collective_rpc, self._sites
        if in_process(self._engine):
            call(lambda wrapper: vllm_worker.begin(wrapper.worker, sites))
            return lambda: call(lambda wrapper: vllm_worker.end(wrapper.worker))[0]
        config = self._engine.llm_engine.vllm_config.parallel_config
        if config.worker_extension_cls != _EXTENSION and config.worker_cls != _WORKER:
            raise FormError(
                "this engine runs in other processes, and its workers have no taps: start it with "
                f"LLM(..., worker_extension_cls={_EXTENSION!r}), or in this process with "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0"
            )
        call("torchtap_begin", args=(sites,))
        folder = tempfile.mkdtemp(prefix="torchtap-serving-")
        weakref.finalize(self.seen, shutil.rmtree, folder, ignore_errors=True)
        return lambda: ServedRun(call("torchtap_end", args=(folder,))[0])

    def __exit__(self, *_: object) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            self.seen.fill(stop())


def in_process(engine: Any) -> bool:
    """Return True if the workers of a vLLM engine run in this process."""
    core = engine.llm_engine.engine_core
    executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
    return hasattr(executor, "driver_worker") and not hasattr(executor, "workers")
