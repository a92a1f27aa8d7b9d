"""Faults between trainer and rollout, and harmless differences; run by ``make serving``.

The trainer is a model of Hugging Face. The rollout is vLLM on a copy of its folder, with one thing changed in the
weights, the configuration or the sampling. Each fault has the site or the words that name it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.serving.vllm_campaign import VOCABULARY, make_engine, saved_model

SITES = (
    "model.embed_tokens:output", "model.layers.*.self_attn.o_proj:output", "model.layers.*.mlp:output",
    "model.layers.*:output", "model.norm:output",
)  # fmt: skip
Weights = dict[str, torch.Tensor]


def stale(*parts: str) -> Callable[[Weights], None]:
    """Move the weights whose names contain a part, as one more update would have."""

    def change(weights: Weights) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, value in weights.items():
            if any(part in name for part in parts):
                value += (
                    0.02
                    * value.std().nan_to_num(1.0).clamp(min=0.1)
                    * torch.randn(value.shape, generator=generator)
                )

    return change


def rounded(*parts: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in weights:
            if any(part in name for part in parts):
                weights[name] = weights[name].bfloat16().float()

    return change


def stale_adapter(weights: Weights) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, value in weights.items():
        if "q_proj" in name:
            value += (
                0.02
                * torch.randn(value.shape[0], 2, generator=generator)
                @ torch.randn(2, value.shape[1], generator=generator)
            )


PROCESSED = {"logprobs_mode": "processed_logprobs"}
# name -> weights, configuration, engine, sampling, and what has to be named
FAULTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "rope theta": (
        None,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {},
        {},
        "layers.0.self_attn",
    ),
    "rope scaling": (
        None,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {},
        {},
        "layers.0.self_attn",
    ),
    "norm epsilon": (None, {"rms_norm_eps": 1e-4}, {}, {}, "layers.0.self_attn"),
    "layer 1 not synchronised": (stale("layers.1."), {}, {}, {}, "layers.1.self_attn"),
    "one matrix not synchronised": (stale("layers.2.mlp.down_proj"), {}, {}, {}, "layers.2.mlp"),
    "attention output not synchronised": (
        stale("layers.1.self_attn.o_proj"),
        {},
        {},
        {},
        "layers.1.self_attn",
    ),
    "embedding not synchronised": (stale("embed_tokens"), {}, {}, {}, "embed_tokens"),
    "head not synchronised": (stale("lm_head"), {}, {}, {}, "the head differs"),
    "last norm not synchronised": (stale("model.norm"), {}, {}, {}, "model.norm"),
    "head in bfloat16": (rounded("lm_head"), {}, {}, {}, "head computes in bfloat16"),
    "stale adapter": (stale_adapter, {}, {}, {}, "layers.0.self_attn"),
    "layer 1 rounded to bfloat16": (rounded("layers.1."), {}, {}, {}, "layers.1.self_attn"),
    "top-k renormalisation": (None, {}, PROCESSED, {"top_k": 20}, "20 most probable tokens (top-k)"),
    "top-p renormalisation": (None, {}, PROCESSED, {"top_p": 0.8}, "(top-p)"),
    "sampling temperature": (None, {}, PROCESSED, {"temperature": 0.7}, "temperature 0.7"),
}
# name -> engine, sampling, reference
HARMLESS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "small chunks": ({"max_num_batched_tokens": 32}, {}, {}),
    "large batches": ({"max_num_batched_tokens": 200, "max_num_seqs": 16}, {}, {}),
    "one request at a time": ({"max_num_seqs": 1}, {}, {}),
    "no prefix cache": ({"enable_prefix_caching": False}, {}, {}),
    "prefix cache": ({"enable_prefix_caching": True}, {}, {}),
    "preemption": ({"num_gpu_blocks_override": 9, "max_num_seqs": 8}, {}, {}),
    "larger blocks": ({"block_size": 64, "num_gpu_blocks_override": 24}, {}, {}),
    "several outputs": ({}, {"n": 3}, {}),
    "eager attention in the trainer": ({}, {}, {"attn_implementation": "eager"}),
    "raw log-probabilities at temperature 0.7": ({}, {"temperature": 0.7}, {}),
    "both in bfloat16": ({"dtype": "bfloat16"}, {}, {"dtype": torch.bfloat16}),
}


def prompts() -> list[dict[str, Any]]:
    rng = random.Random(5)
    shared = [rng.randrange(VOCABULARY) for _ in range(70)]
    made = [[rng.randrange(VOCABULARY) for _ in range(size)] for size in (40, 9, 75)]
    made += [shared + [rng.randrange(VOCABULARY) for _ in range(6)] for _ in range(3)]
    return [{"prompt_token_ids": each} for each in made]


def rollout(path: Path, engine: dict[str, Any], sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    from torchtap import serving

    llm = make_engine(path, random.Random(0), **{"num_gpu_blocks_override": 40, **engine})
    torch.manual_seed(0)
    params = SamplingParams(**{
        "max_tokens": 24, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, **sampling,
    })  # fmt: skip
    with serving.capture(llm, *SITES) as seen:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
    seen.add_outputs(outputs)
    return seen


def changed_copy(path: Path, weights: Any, config: dict[str, Any]) -> Path:
    copy = path.with_name(path.name + "-rollout")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    if config:
        known = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**known, **config}))
    if weights is not None:
        values = load_file(copy / "model.safetensors")
        weights(values)
        save_file(values, copy / "model.safetensors", {"format": "pt"})
    return copy


def main() -> int:
    from transformers import AutoModelForCausalLM

    import torchtap as tt

    named = accused = 0
    with tempfile.TemporaryDirectory() as folder:
        path = saved_model("Llama", Path(folder))
        trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, (weights, config, engine, sampling, expected) in FAULTS.items():
            result = tt.compare(
                trainer, rollout(changed_copy(path, weights, config), engine, sampling), by="token"
            )
            right = result.first is not None and expected in f"{result.first.site} {result.first.what}"
            named += right
            print(f"{'named ' if right else 'MISSED'}  {name}: {result}", flush=True)
        for name, (engine, sampling, reference) in HARMLESS.items():
            model = AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **reference}).eval()
            result = tt.compare(model, rollout(path, engine, sampling), by="token")
            accused += not result.same
            print(f"{'silent ' if result.same else 'ACCUSED'}  {name}: {result}", flush=True)
    print(f"{named} of {len(FAULTS)} faults named, {accused} of {len(HARMLESS)} harmless differences accused")
    return int(named < len(FAULTS) - 2 or accused > 0)


if __name__ == "__main__":
    sys.exit(main())
