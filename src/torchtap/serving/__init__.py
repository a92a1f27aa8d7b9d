"""Values inside serving engines, each with its request and position.

    from torchtap import serving

    with serving.capture(llm, "model.layers.*:output") as seen:
        outputs = llm.generate(prompts)
    seen.of_request(outputs[0].request_id)["model.layers.3:output"]

`addresses` knows rows and requests, `recorder` takes rows from a running model, `vllm_worker` and
`transformers_engine` read an engine's own table of each step.
"""

from __future__ import annotations

from torchtap.serving.addresses import RequestTokens
from torchtap.serving.engine_capture import capture
from torchtap.serving.steering import steer
from torchtap.serving.values import ServedRun, ServedValues, open_run

__all__ = ["RequestTokens", "ServedRun", "ServedValues", "capture", "open_run", "steer"]
