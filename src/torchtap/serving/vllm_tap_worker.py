"""A vLLM worker with taps in its compiled graph: ``worker_cls="torchtap.serving.vllm_tap_worker.TapWorker"``.

vLLM compiles the model when the engine starts. This worker registers its hooks between loading and compiling, so that
each chosen site is an op in the graph. The sites come from ``additional_config={"torchtap": {"sites": [...]}}``, which
is part of the key of vLLM's compile cache. Imported by vLLM alone.
"""

from __future__ import annotations

from typing import Any

from torchtap.errors import MissingExtraError
from torchtap.serving.recorder import RowRecorder
from torchtap.serving.vllm_worker import ServedRecorder, VllmEngine, WorkerExtension, check_version

try:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
except ImportError as error:
    raise MissingExtraError("torchtap.serving.vllm_tap_worker is for vLLM, which is not installed") from error

__all__ = ["TapWorker"]


class TapWorker(WorkerExtension, Worker):  # type: ignore[misc]
    """The platform's worker with taps."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and register the hooks, before anything compiles it."""
        check_version()
        super().load_model(*args, **kwargs)
        settings = dict((self.vllm_config.additional_config or {}).get("torchtap") or {})
        sites = settings.get("sites") or ["**.layers.*:output"]
        model = self.model_runner.get_model()
        if not settings.get("out") or self.rank:
            self._torchtap_graph = RowRecorder(model, sites, in_graph=True)
            return
        self._torchtap_graph = ServedRecorder(model, sites, settings)
        VllmEngine(self.model_runner, self._torchtap_graph)
