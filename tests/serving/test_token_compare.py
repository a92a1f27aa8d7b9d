"""``compare(model, run, by="token")`` on models of transformers; `rollout_faults` has vLLM as the rollout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optional import need

import torchtap as tt
from torchtap import serving
from torchtap.errors import CompareError

transformers: Any = need("transformers")
LlamaConfig: Any = transformers.LlamaConfig
LlamaForCausalLM: Any = transformers.LlamaForCausalLM

SITES = (
    "model.embed_tokens:output",
    "model.layers.*.mlp:output",
    "model.layers.*:output",
    "model.norm:output",
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rollout(model: LlamaForCausalLM, *, temperature: float = 1.0, top_k: int = 0) -> serving.ServedValues:
    """Generate with log-probabilities as an engine would report them."""
    prompts = torch.randint(1, 128, (3, 12), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with serving.capture(model, *SITES) as seen:
        made = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=True, top_k=top_k,
            temperature=temperature, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    scores = torch.stack(made.scores, 1).log_softmax(-1)
    outputs = []
    for row in range(3):
        tokens = made.sequences[row, 12:].tolist()
        steps = [{token: _Logprob(float(scores[row, at, token]))} for at, token in enumerate(tokens)]
        outputs.append(_Output(str(row), [_Completion(0, tokens, steps)]))
    seen.add_outputs(outputs)
    return seen


class _Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


class _Completion:
    def __init__(self, index: int, token_ids: list[int], logprobs: list[Any]) -> None:
        self.index, self.token_ids, self.logprobs = index, token_ids, logprobs


class _Output:
    def __init__(self, request_id: str, outputs: list[_Completion]) -> None:
        self.request_id, self.outputs = request_id, outputs


def test_the_same_model_is_the_same_also_from_a_folder(model: LlamaForCausalLM, tmp_path: Path) -> None:
    seen = rollout(model)
    result = tt.compare(model, seen, by="token")
    assert result.same
    assert result.facts["logprobs"] == 24
    assert tt.compare(model, seen.save(tmp_path / "run"), by="token").same


@pytest.mark.parametrize(
    ("weight", "site"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens:output"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp:output"),
        ("model.layers.2.self_attn.v_proj.weight", "model.layers.2.mlp:output"),
        ("model.norm.weight", "model.norm:output"),
    ],
)
def test_a_weight_that_is_not_synchronised_is_named(model: LlamaForCausalLM, weight: str, site: str) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(weight).mul_(1.01)
    result = tt.compare(model, rollout(other), by="token")
    assert result.diverged
    assert result.first is not None
    assert result.first.site == site


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.6}, "temperature 0.6"),
        ({"top_k": 20}, "renormalised over the 20 most probable tokens"),
    ],
)
def test_other_log_probabilities_are_explained(
    model: LlamaForCausalLM, options: dict[str, Any], words: str
) -> None:
    result = tt.compare(model, rollout(model, **options), by="token")
    assert result.diverged
    assert words in str(result)


def test_a_head_in_lower_precision_is_named(model: LlamaForCausalLM) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.bfloat16())
    assert "head computes in bfloat16" in str(tt.compare(model, rollout(other), by="token"))


def test_bad_input_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(CompareError, match=r"torchtap\.serving recorded"):
        tt.compare(model, {"a": torch.ones(1)}, by="token")
    with pytest.raises(CompareError, match="give a model of transformers"):
        tt.compare(torch.nn.Linear(2, 2), rollout(model), by="token")
    with pytest.raises(CompareError, match="by='row'"):
        tt.compare(model, model, by="row")  # type: ignore[arg-type]
