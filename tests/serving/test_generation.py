"""Hugging Face's ``generate`` and ``generate_batch``: every row at its request and position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optional import need

from torchtap import serving
from torchtap.errors import FormError, PlanError, SelectionError, SessionError

transformers: Any = need("transformers")
ContinuousBatchingConfig: Any = transformers.ContinuousBatchingConfig
GenerationConfig: Any = transformers.GenerationConfig
LlamaConfig: Any = transformers.LlamaConfig
LlamaForCausalLM: Any = transformers.LlamaForCausalLM

LAYERS = [f"model.layers.{number}" for number in range(3)]
PROMPTS = [[(i * 7 + j * j) % 120 + 8 for j in range(n)] for i, n in enumerate([20, 9, 33, 5])]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, eos_token_id=7, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(each)) + each for each in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts]),
    }


@torch.no_grad()
def rows_by_hooks(model: LlamaForCausalLM, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Run one sequence alone, with torch's own hooks."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _args, output: found.__setitem__(name, output[0])

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in LAYERS]
    model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return {path: value.reshape(len(tokens), -1) for path, value in found.items()}


def check(seen: serving.ServedValues | serving.ServedRun, model: LlamaForCausalLM) -> int:
    """Assert that each row is nearest to its own position, and return the number of rows."""
    assert seen.problems == {}
    count = 0
    for name in seen.requests:
        values = seen.of_request(name)
        expected = rows_by_hooks(model, values.tokens)
        assert values.missing == {}
        for path in LAYERS:
            got = values[f"{path}:output"]
            torch.testing.assert_close(got, expected[path][values.positions], atol=1e-5, rtol=0)
            assert torch.cdist(got.double(), expected[path].double()).argmin(1).tolist() == values.positions
        assert values.generated.tolist() == [at >= len(values.request.prompt) for at in values.positions]
        count += len(values.positions)
    return count


def test_rows_of_a_padded_batch_have_the_positions_of_their_tokens(model: LlamaForCausalLM) -> None:
    plain = model.generate(**padded(PROMPTS), max_new_tokens=6, do_sample=False)
    with serving.capture(model) as seen:
        made = model.generate(**padded(PROMPTS), max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, made)
    assert "generate" not in model.__dict__
    assert [seen.of_request(str(each)).request.prompt for each in range(4)] == PROMPTS
    assert check(seen, model) == sum(map(len, PROMPTS)) + 4 * 5


def test_several_outputs_of_a_prompt_are_samples_of_one_request(model: LlamaForCausalLM) -> None:
    torch.manual_seed(3)
    with serving.capture(model) as seen:
        made = model.generate(**padded(PROMPTS[:2]), max_new_tokens=6, do_sample=True, num_return_sequences=2)
    check(seen, model)
    with pytest.raises(SelectionError, match=r"'1' has 2 recordings.*give sample="):
        seen.of_request("1")
    values = seen.of_request("1", sample=1)
    assert values.tokens == made[3].tolist()[11:][: len(values.tokens)]


def test_drafts_that_were_rejected_are_not_in_the_token_order(model: LlamaForCausalLM) -> None:
    with serving.capture(model) as seen:
        model.generate(
            torch.tensor(PROMPTS[2:3]), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
        )
    check(seen, model)
    values = seen.of_request("0")
    assert values.rejected
    first = values.rejected[0]
    expected = rows_by_hooks(model, [*values.tokens[: first.position], first.token])
    torch.testing.assert_close(
        first.values["model.layers.1:output"], expected["model.layers.1"][-1], atol=1e-5, rtol=0
    )


def test_a_second_generate_and_a_plain_call_are_further_requests(model: LlamaForCausalLM) -> None:
    with serving.capture(model) as seen, torch.no_grad():
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=3, do_sample=False)
        model(**padded(PROMPTS[1:3]))
    assert seen.requests == ["0", "1", "2"]
    assert check(seen, model) == 22 + 9 + 33


@pytest.mark.parametrize("samples", [1, 2])
def test_continuous_batching_has_the_same_addresses(model: LlamaForCausalLM, samples: int) -> None:
    config = GenerationConfig(
        max_new_tokens=8, do_sample=samples > 1, num_return_sequences=samples, eos_token_id=7, pad_token_id=0
    )
    implementation = model.config._attn_implementation
    prompts = [*PROMPTS, [*PROMPTS[2][:30], 9, 10]]
    torch.manual_seed(0)
    # Without a number of blocks its cache takes all of the machine's memory.
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=64)
    plain = model.generate_batch(prompts, generation_config=config, continuous_batching_config=cache)
    torch.manual_seed(0)
    with serving.capture(model) as seen:
        made = model.generate_batch(prompts, generation_config=config, continuous_batching_config=cache)
    model.set_attn_implementation(implementation)
    assert len(made) == len(prompts) * samples
    if samples == 1:
        tokens = [each.generated_tokens for each in made.values()]
        assert tokens == [each.generated_tokens for each in plain.values()]
    for name, output in made.items():
        assert seen.of_request(name).tokens == [*output.prompt_ids, *output.generated_tokens]
    check(seen, model)


def test_a_saved_run_gives_the_same_tokens(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with serving.capture(model, "model.layers.*:output") as seen:
        model.generate(
            torch.tensor(PROMPTS[2:3]), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
        )
    run = seen.save(tmp_path / "run")
    assert check(run, model)
    was, now = seen.of_request("0"), run.tokens("0")
    assert (now.tokens, now.positions, now.computed_by) == (was.tokens, was.positions, was.computed_by)
    assert [each[:2] for each in now.rejected] == [each[:2] for each in was.rejected]


def test_bad_input_is_refused_with_what_to_do(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with serving.capture(model) as seen:
        with pytest.raises(SessionError, match="ask after the block"):
            seen.of_request("0")
        with pytest.raises(PlanError, match="num_beams=2"):
            model.generate(torch.tensor(PROMPTS[:1]), num_beams=2, max_new_tokens=2)
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, do_sample=False)
    with pytest.raises(
        SelectionError, match=r"request 'nobody' is not among the 1 recorded ones; some are '0'"
    ):
        seen.of_request("nobody")
    with pytest.raises(SelectionError, match=r"'model.layers.7:output' was not recorded"):
        seen.of_request("0")["model.layers.7:output"]
    with pytest.raises(SelectionError, match="matches none"), serving.capture(model, "model.layer.*:output"):
        pass
    with (
        pytest.raises(PlanError, match="outputs of modules can be taken"),
        serving.capture(model, "lm_head:input"),
    ):
        pass
    with pytest.raises(FormError, match="no engine that torchtap knows"), serving.capture(object()):
        pass
    with pytest.raises(FileNotFoundError, match="no folder of recorded requests"):
        serving.open_run(tmp_path / "nothing")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_value_without_a_row_for_each_token_is_reported(model: LlamaForCausalLM) -> None:
    with serving.capture(model, "lm_head:output", "model.layers.0:output") as seen:
        model.generate(**padded(PROMPTS[:2]), max_new_tokens=2, do_sample=False)
    assert "does not have one row for each" in seen.problems["lm_head:output"]
    assert list(seen.of_request("0")) == ["model.layers.0:output"]


def test_steering_changes_the_chosen_tokens_of_the_chosen_request_alone(model: LlamaForCausalLM) -> None:
    vector = torch.linspace(-1, 1, 64)
    inputs = padded(PROMPTS[:3])
    with serving.capture(model) as plain:
        model.generate(**inputs, max_new_tokens=5, do_sample=False)
    change = {"model.layers.1:output": lambda rows: rows + vector}
    steer = serving.steer(model, change, requests=["1"], tokens=range(4, 100))
    with serving.capture(model) as seen, steer as steering:
        model.generate(**inputs, max_new_tokens=5, do_sample=False)
    for request in ("0", "2"):
        assert torch.equal(
            seen.of_request(request)["model.layers.2:output"],
            plain.of_request(request)["model.layers.2:output"],
        )
    values = seen.of_request("1")
    assert steering.applied == {"1": len(values.positions) - 4}

    def reference(_module: object, _args: object, output: Any) -> Any:
        output = output.clone()
        output[:, 4:] += vector
        return output

    handle = model.model.layers[1].register_forward_hook(reference)
    try:
        expected = rows_by_hooks(model, values.tokens)
    finally:
        handle.remove()
    got = values["model.layers.2:output"]
    torch.testing.assert_close(got, expected["model.layers.2"][values.positions], atol=1e-5, rtol=0)


def test_steering_a_range_with_a_step_leaves_the_positions_between(model: LlamaForCausalLM) -> None:
    change = {"model.layers.1:output": torch.zeros_like}
    with serving.steer(model, change, tokens=range(1, 20, 3)), serving.capture(model) as seen:
        model(torch.tensor(PROMPTS[:1]))
    rows = seen.of_request("0")["model.layers.1:output"]
    assert (rows == 0).all(1).nonzero().flatten().tolist() == list(range(1, 20, 3))


def test_a_capture_around_another_one_keeps_its_addresses(model: LlamaForCausalLM) -> None:
    inputs = {"max_new_tokens": 3, "do_sample": False}
    outer, inner = serving.capture(model), serving.capture(model)
    seen = outer.__enter__()
    also_seen = inner.__enter__()
    model.generate(**padded(PROMPTS[:2]), **inputs)
    outer.__exit__(None, None, None)
    model.generate(torch.tensor(PROMPTS[2:3]), **inputs)
    inner.__exit__(None, None, None)
    assert check(seen, model) == 20 + 9 + 2 * 2
    assert check(also_seen, model) == 20 + 9 + 33 + 3 * 2
    assert "generate" not in model.__dict__


def test_steering_of_bad_input_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(PlanError, match="steering needs functions"):
        serving.steer(model, {"model.layers.1:output": 3.0})  # type: ignore[dict-item]
    with (
        pytest.raises(PlanError, match="must return rows of shape"),
        serving.steer(model, {"model.layers.1:output": lambda rows: rows[:, :2]}),
    ):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, do_sample=False)
    assert not any(module._forward_hooks for module in model.modules())
