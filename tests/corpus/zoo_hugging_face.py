"""Hugging Face architectures with random weights and tiny sizes, each with inputs to call it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["HUGGING_FACE"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# The sizes that most configurations know; each takes those that it has.
_TEXT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5}
_SEQUENCES = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SOUND = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 12,
    "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def _tokens(length: int = 6) -> torch.Tensor:
    return torch.randint(3, 40, (2, length))


def _text() -> dict[str, Any]:
    return {"input_ids": _tokens()}


def _decoding() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": False}


def _cached() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": True}


def _attending() -> dict[str, Any]:
    return {
        "input_ids": _tokens(),
        "use_cache": False,
        "output_attentions": True,
        "output_hidden_states": True,
    }


def _both() -> dict[str, Any]:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens(4), "use_cache": False}


def _picture(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def _build(
    name: str,
    model: str,
    sizes: Mapping[str, Any],
    inputs: Callable[[], dict[str, Any]],
    more: Mapping[str, Any],
) -> Built:
    import transformers

    given = inputs()
    # Switches go into the configuration: a trace takes tensors only.
    switches = {key: value for key, value in given.items() if isinstance(value, bool)}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more, **switches})
    made = getattr(transformers, model)(config)
    return made, (), {key: value for key, value in given.items() if key not in switches}


def _case(
    name: str, model: str, sizes: Mapping[str, Any], inputs: Callable[[], dict[str, Any]], **more: Any
) -> Callable[[], Built]:
    return partial(_build, name, model, sizes, inputs, more)


_EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_EAGER = {"attn_implementation": "eager"}
_SMALL_PICTURE = partial(_picture, 32)

HUGGING_FACE: dict[str, Callable[[], Built]] = {
    "bert": _case("Bert", "BertModel", _TEXT, _text),
    "roberta": _case("Roberta", "RobertaModel", _TEXT, _text),
    "distilbert": _case(
        "DistilBert", "DistilBertModel", {}, _text, vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32,
    ),
    "albert": _case("Albert", "AlbertModel", _TEXT, _text, embedding_size=8),
    "electra": _case("Electra", "ElectraModel", _TEXT, _text, embedding_size=8),
    "deberta": _case("DebertaV2", "DebertaV2Model", _TEXT, _text),
    "mpnet": _case("MPNet", "MPNetModel", _TEXT, _text),
    "modernbert": _case("ModernBert", "ModernBertModel", _TEXT, _text),
    "fnet": _case("FNet", "FNetModel", _TEXT, _text),
    "squeezebert": _case("SqueezeBert", "SqueezeBertModel", _TEXT, _text, embedding_size=16),
    "gpt2": _case(
        "GPT2", "GPT2LMHeadModel", {}, _decoding, vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
    ),
    "gpt2, attentions": _case(
        "GPT2", "GPT2LMHeadModel", _EAGER, _attending, vocab_size=40, n_embd=16, n_layer=2, n_head=2,
        n_positions=32,
    ),
    "gpt2, cache": _case(
        "GPT2", "GPT2LMHeadModel", {}, _cached, vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
    ),
    "gpt_neo": _case(
        "GPTNeo", "GPTNeoForCausalLM", {}, _decoding, vocab_size=40, hidden_size=16, num_layers=2, num_heads=2,
        max_position_embeddings=32, attention_types=[[["global", "local"], 1]],
    ),
    "gpt_neox": _case("GPTNeoX", "GPTNeoXForCausalLM", _TEXT, _decoding),
    "gptj": _case(
        "GPTJ", "GPTJForCausalLM", {}, _decoding, vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        rotary_dim=4,
    ),
    "opt": _case("OPT", "OPTForCausalLM", _TEXT, _decoding, ffn_dim=32, word_embed_proj_dim=16),
    "bloom": _case("Bloom", "BloomForCausalLM", {}, _decoding, vocab_size=40, hidden_size=16, n_layer=2, n_head=2),
    "llama": _case("Llama", "LlamaForCausalLM", _TEXT, _decoding, num_key_value_heads=2),
    "llama, cache": _case("Llama", "LlamaForCausalLM", _TEXT, _cached, num_key_value_heads=2),
    "mistral": _case("Mistral", "MistralForCausalLM", _TEXT, _decoding, num_key_value_heads=2),
    "qwen2": _case("Qwen2", "Qwen2ForCausalLM", _TEXT, _decoding, num_key_value_heads=2),
    "qwen3": _case("Qwen3", "Qwen3ForCausalLM", _TEXT, _decoding, num_key_value_heads=2, head_dim=8),
    "phi": _case("Phi", "PhiForCausalLM", _TEXT, _decoding),
    "phi3": _case("Phi3", "Phi3ForCausalLM", _TEXT, _decoding, num_key_value_heads=2),
    "gemma2": _case("Gemma2", "Gemma2ForCausalLM", _TEXT, _decoding, num_key_value_heads=2, head_dim=8),
    "falcon": _case("Falcon", "FalconForCausalLM", _TEXT, _decoding),
    "olmo2": _case("Olmo2", "Olmo2ForCausalLM", _TEXT, _decoding),
    "stablelm": _case("StableLm", "StableLmForCausalLM", _TEXT, _decoding, num_key_value_heads=4),
    "mixtral": _case("Mixtral", "MixtralForCausalLM", _TEXT, _decoding, **_EXPERTS, output_router_logits=True),
    "qwen2_moe": _case(
        "Qwen2Moe", "Qwen2MoeForCausalLM", _TEXT, _decoding, **_EXPERTS, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    "mamba": _case("Mamba", "MambaForCausalLM", _TEXT, _decoding, state_size=4),
    "t5": _case("T5", "T5ForConditionalGeneration", _T5, _both),
    "mt5": _case("MT5", "MT5ForConditionalGeneration", _T5, _both),
    "bart": _case("Bart", "BartForConditionalGeneration", _SEQUENCES, _both),
    "marian": _case("Marian", "MarianMTModel", _SEQUENCES, _both),
    "pegasus": _case("Pegasus", "PegasusForConditionalGeneration", _SEQUENCES, _both),
    "whisper": _case(
        "Whisper", "WhisperForConditionalGeneration", _SEQUENCES,
        lambda: {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": _tokens(4), "use_cache": False},
        num_mel_bins=8, max_source_positions=10, max_target_positions=16,
    ),
    "vit": _case("ViT", "ViTForImageClassification", _PICTURE, _picture),
    "deit": _case("DeiT", "DeiTModel", _PICTURE, _picture),
    "beit": _case("Beit", "BeitModel", _PICTURE, _picture),
    "dinov2": _case("Dinov2", "Dinov2Model", _PICTURE, _picture),
    "swin": _case(
        "Swin", "SwinModel", {}, _picture, image_size=16, patch_size=2, embed_dim=8, depths=[2, 2],
        num_heads=[2, 2], window_size=2,
    ),
    "convnext": _case(
        "ConvNext", "ConvNextModel", {}, _SMALL_PICTURE, hidden_sizes=[8, 16], depths=[1, 2], num_stages=2,
        drop_path_rate=0.1,
    ),
    "resnet": _case("ResNet", "ResNetForImageClassification", _STAGES, _SMALL_PICTURE, layer_type="bottleneck"),
    "regnet": _case("RegNet", "RegNetModel", _STAGES, _SMALL_PICTURE, groups_width=4),
    "mobilenet_v1": _case("MobileNetV1", "MobileNetV1Model", {}, _SMALL_PICTURE, depth_multiplier=0.25),
    "mobilenet_v2": _case("MobileNetV2", "MobileNetV2Model", {}, _SMALL_PICTURE, depth_multiplier=0.35),
    "efficientnet": _case(
        "EfficientNet", "EfficientNetModel", {}, _SMALL_PICTURE, width_coefficient=0.25, depth_coefficient=0.5,
        hidden_dim=320, image_size=32,
    ),
    "segformer": _case(
        "Segformer", "SegformerModel", {}, _SMALL_PICTURE, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
    ),
    "mobilevit": _case(
        "MobileViT", "MobileViTModel", {}, _SMALL_PICTURE, hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 8], num_attention_heads=2,
    ),
    "poolformer": _case(
        "PoolFormer", "PoolFormerModel", {}, _SMALL_PICTURE, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1],
    ),
    "levit": _case(
        "Levit", "LevitModel", {}, partial(_picture, 64), image_size=64, hidden_sizes=[16, 16, 16],
        num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4],
    ),
    "clip": _case("CLIPVision", "CLIPVisionModel", _PICTURE, _picture),
    "wav2vec2": _case("Wav2Vec2", "Wav2Vec2ForCTC", _SOUND, _sound),
    "hubert": _case("Hubert", "HubertModel", _SOUND, _sound),
    "patchtst": _case(
        "PatchTST", "PatchTSTModel", {}, lambda: {"past_values": torch.randn(2, 16, 2)}, num_input_channels=2,
        context_length=16, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, ffn_dim=32,
        num_hidden_layers=2,
    ),
    "time_series": _case(
        "PatchTSMixer", "PatchTSMixerModel", {}, lambda: {"past_values": torch.randn(2, 16, 2)},
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=8, num_layers=2,
    ),
}  # fmt: skip
