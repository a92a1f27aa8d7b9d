"""Values inside serving engines, each with its request and position.

    from torchtap import serving

    with serving.capture(llm, "model.layers.*:output") as seen:
        outputs = llm.generate(prompts)
    seen.of_request(outputs[0].request_id)["model.layers.3:output"]

`addresses` knows rows and requests, `recorder` takes rows from a running model, `vllm_worker` and
`transformers_engine` read an engine's own table of each step.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtap.serving.addresses import RequestTokens as RequestTokens
    from torchtap.serving.engine_capture import capture as capture
    from torchtap.serving.steering import steer as steer
    from torchtap.serving.values import ServedRun as ServedRun
    from torchtap.serving.values import ServedValues as ServedValues
    from torchtap.serving.values import open_run as open_run

_HOME = {
    "RequestTokens": "torchtap.serving.addresses",
    "ServedRun": "torchtap.serving.values",
    "ServedValues": "torchtap.serving.values",
    "capture": "torchtap.serving.engine_capture",
    "open_run": "torchtap.serving.values",
    "steer": "torchtap.serving.steering",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap.serving' has no attribute {name!r}")
    return getattr(import_module(home), name)
