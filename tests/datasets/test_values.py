"""Harvested values are bit-equal to hooks by hand and to ``output_hidden_states``, in five architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datasets.models import by_hand
from tests.optional import need

import torchtap as tt

transformers = need("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=60, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=60, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, **SMALL
    )
    return transformers.LlamaModel(config)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL))


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperModel(config)


def padded(count: int, longest: int) -> dict[str, torch.Tensor]:
    lengths = torch.randint(2, longest + 1, (count, 1))
    mask = (torch.arange(longest) < lengths).long()
    return {"input_ids": torch.randint(3, 60, (count, longest)) * mask, "attention_mask": mask}


def images(count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32)}


def speech(count: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(count, 16, 40),
        "decoder_input_ids": torch.randint(3, 60, (count, 7)),
    }


# model, batches, site and module of each layer, rows, positions left out in front, name and shift of its hidden states
CASES: dict[str, Any] = {
    "gpt2": (gpt2, padded, "h.{}:output", lambda m: m.h, "token", 0, "hidden_states"),
    "llama": (llama, padded, "layers.{}:output", lambda m: m.layers, "token", 0, "hidden_states"),
    "t5": (t5, padded, "encoder.block.{}:output.0", lambda m: m.encoder.block, "token", 0, "hidden_states"),
    "vit": (vit, lambda n, _: images(n), None, lambda m: m.layers if hasattr(m, "layers") else m.encoder.layer,
            "patch", 1, "hidden_states"),
    "whisper encoder": (whisper, lambda n, _: speech(n), "encoder.layers.{}:output", lambda m: m.encoder.layers,
                        "token", 0, "encoder_hidden_states"),
    "whisper decoder": (whisper, lambda n, _: speech(n), "decoder.layers.{}:output", lambda m: m.decoder.layers,
                        "token", 0, "decoder_hidden_states"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_bit_equal_to_hooks_by_hand_and_to_output_hidden_states(name: str, tmp_path: Path) -> None:
    make, inputs, site, layers, rows, skipped, states = CASES[name]
    model = make().eval()
    batches = [inputs(4, length) for length in (9, 13, 5)]
    modules = layers(model)
    if site is None:
        path = next(each for each, module in model.named_modules() if module is modules)
        site = f"{path}.{{}}:output"
    sites = [site.format(number) for number in range(2)]
    acts = tt.harvest(model, batches, sites, tmp_path / "acts", rows, window=8)

    found, outputs = by_hand(
        model,
        [((), {**batch, "output_hidden_states": True}) for batch in batches],
        dict(zip(sites, modules, strict=True)),
    )
    everything = acts.rows(range(len(acts)))
    at = {
        (document, position): index
        for index, (document, position) in enumerate(
            zip(everything["document"].tolist(), everything["position"].tolist(), strict=True)
        )
    }
    assert len(at) == len(acts)
    expected = 0
    for number, (batch, values, output) in enumerate(zip(batches, found, outputs, strict=True)):
        hidden = getattr(output, states)
        for layer, name_of_site in enumerate(sites):
            value = values[name_of_site][:, skipped:]
            # hidden_states[i + 1] is the output of layer i; the last one has passed the final norm.
            if layer + 2 < len(hidden):
                assert torch.equal(hidden[layer + 1][:, skipped:], value)
            mask = batch.get("attention_mask", torch.ones(value.shape[:2]))
            for document, position in mask.nonzero().tolist():
                row = at[4 * number + document, position]
                assert torch.equal(everything[name_of_site][row], value[document, position])
                tokens = batch.get("decoder_input_ids" if "decoder" in name else "input_ids")
                known = -1 if tokens is None else int(tokens[document, position])
                assert int(everything["token"][row]) == known
            expected += int(mask.sum())
    assert 2 * len(acts) == expected


def test_encoder_and_decoder_sites_are_refused_in_one_folder(tmp_path: Path) -> None:
    with pytest.raises(tt.PlanError, match="other rows"):
        tt.harvest(
            whisper(), [speech(2)], ["encoder.layers.0:output", "decoder.layers.0:output"], tmp_path / "acts"
        )
    # The same length by chance: the tokens tell them apart.
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5Model(config)
    batch = {"input_ids": torch.randint(3, 60, (2, 6)), "decoder_input_ids": torch.randint(3, 60, (2, 6))}
    sites = ["encoder.block.0:output.0", "decoder.block.0:output.0"]
    with pytest.raises(tt.PlanError, match="other rows"):
        tt.harvest(model, [batch], sites, tmp_path / "both")
    acts = tt.harvest(model, [batch], sites[1], tmp_path / "decoder", shuffle=False)
    assert acts.read("token").tolist() == batch["decoder_input_ids"].flatten().tolist()


def test_a_site_without_rows_says_what_to_select(tmp_path: Path) -> None:
    with pytest.raises(tt.PlanError, match=r"output\.1.* has the shape .*block:output\.0"):
        tt.harvest(t5(), [padded(2, 5)], "encoder.block.0:output", tmp_path / "acts")
