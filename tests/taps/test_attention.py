"""Attention maps against plain softmax arithmetic, on every way that torch computes attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import GPT, make
from torch import Tensor, nn

import torchtap as tt
from torchtap.receive import attention


class Fused(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def plain(q: Tensor, k: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    scores = q.double() @ k.double().transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    return torch.softmax(scores if bias is None else scores + bias.double(), -1)


def maps(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with tt.capture(model, ":attention") as seen:
        model(*args, **kwargs)
    return seen[":attention"]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=1e-6, rtol=1e-5)


def test_plain_causal_masked_and_scaled_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    causal = torch.full((5, 5), -math.inf).triu(1)
    close(maps(Fused(), q, k, v), plain(q, k))
    close(maps(Fused(is_causal=True), q, k, v), plain(q, k, causal))
    close(maps(Fused(scale=0.3), q, k, v), plain(q, k, scale=0.3))
    bias = torch.randn(2, 1, 5, 5)
    close(maps(Fused(attn_mask=bias), q, k, v), plain(q, k, bias))
    allowed = torch.rand(2, 4, 5, 5) > 0.4
    allowed[..., 0] = True
    hidden = torch.zeros(2, 4, 5, 5).masked_fill(~allowed, -math.inf)
    close(maps(Fused(attn_mask=allowed), q, k, v), plain(q, k, hidden))


def test_grouped_queries_share_their_keys() -> None:
    q, k = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8)
    close(maps(Fused(enable_gqa=True), q, k, k), plain(q, k.repeat_interleave(3, 1)))


def test_other_numbers_of_dimensions() -> None:
    q, k = torch.randn(5, 8), torch.randn(7, 8)
    assert maps(Fused(), q, k, torch.randn(7, 8)).shape == (1, 1, 5, 7)
    q = torch.randn(3, 5, 8)
    close(maps(Fused(), q, q, q)[0], plain(q, q))


def test_dropout_neither_shows_nor_uses_up_random_numbers() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    model = Fused(dropout_p=0.5)
    torch.manual_seed(1)
    expected = model(q, k, v)
    torch.manual_seed(1)
    with tt.capture(model, ":attention", ":output") as seen:
        model(q, k, v)
    assert torch.equal(seen[":output"], expected)
    close(seen[":attention"], plain(q, k))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "float": {"attn_mask": torch.full((5, 5), -math.inf).triu(1)},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    "heads": {"attn_mask": torch.randn(8, 5, 5)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mode", ["train", "need_weights=False", "fast path"])
def test_multihead_attention_in_every_path(mask: str, batch_first: bool, mode: str) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).train(mode != "fast path")
    nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
    with torch.no_grad():
        expected = module.train()(x, x, x, **MASKS[mask], average_attn_weights=False)[1]
        module.train(mode != "fast path")
        got = maps(module, x, x, x, **MASKS[mask], need_weights=mode == "train")
    close(got, expected)


@pytest.mark.parametrize(
    "options", [{"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}]
)
def test_multihead_attentions_odd_options(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    x = torch.randn(2, 5, 16)
    k = torch.randn(2, 3, options.get("kdim", 16))
    close(maps(module, x, k, k), module(x, k, k, average_attn_weights=False)[1])


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_encoder_layers_fast_path(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first).eval()
    model, x = nn.Sequential(layer), torch.randn(2, 5, 16)
    called = []
    original = torch._transformer_encoder_layer_fwd
    torch._transformer_encoder_layer_fwd = lambda *a: called.append(1) or original(*a)  # type: ignore[assignment]
    try:
        with torch.no_grad():
            with tt.capture(model, "*:attention") as seen:
                model(x)
    finally:
        torch._transformer_encoder_layer_fwd = original  # type: ignore[assignment]
    assert called, "the fast path was not taken, so this test shows nothing"
    source = layer.norm1(x) if norm_first else x
    close(seen["0:attention"], layer.self_attn(source, source, source, average_attn_weights=False)[1])


def test_maps_go_to_the_innermost_module_that_was_asked_about() -> None:
    case = make("gpt")
    with (
        tt.capture(case.model, "*:attention") as inner,
        tt.capture(case.model, "blocks.*:attention") as outer,
    ):
        case.loss()
    assert list(inner) == ["blocks.0.attn:attention", "blocks.1.attn:attention"]
    assert list(outer) == ["blocks.0:attention", "blocks.1:attention"]
    assert torch.equal(inner["blocks.1.attn:attention"], outer["blocks.1:attention"])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "transformer"])
def test_attention_of_library_models_sums_to_one(name: str) -> None:
    case = make(name)
    with tt.capture(case.model, "*:attention") as seen:
        case.loss()
    assert len(seen) >= 2
    for value in seen.values():
        torch.testing.assert_close(value.sum(-1), torch.ones(value.shape[:-1]))


def test_statistics_of_pieces_equal_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    whole = plain(q, k)
    monkeypatch.setattr(attention, "_PIECE_ELEMENTS", 1)
    with tt.capture(Fused(), ":attention", keep=tt.Stats()) as seen:
        pass
    model = Fused()
    with tt.capture(model, tt.tap(":attention"), tt.tap(":attention", tt.Full())) as seen:
        model(q, k, v)
    assert seen[":attention"]["stats"]["count"] == whole.numel()
    assert seen[":attention"]["stats"]["std"] == pytest.approx(whole.std().item(), rel=1e-5)
    close(seen[":attention"]["full"], whole)


def test_a_tap_on_attention_where_there_is_none_is_told() -> None:
    case = make("mlp")
    with tt.capture(case.model, "*:attention") as seen:
        case.loss()
    assert "no call of a fused attention function" in seen.coverage()[0].reason


def test_two_sessions_share_the_wrappers_and_the_last_takes_them_off() -> None:
    before = F.scaled_dot_product_attention
    model = GPT()
    first, second = tt.capture(model, "*:attention"), tt.capture(model, "*:attention")
    first.__enter__()
    wrapped = F.scaled_dot_product_attention
    second.__enter__()
    assert F.scaled_dot_product_attention is wrapped is not before
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is wrapped
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is before


def test_what_was_seen_is_printed_with_the_dtype_of_attention_maps() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)
    with tt.capture(model, "*:attention") as seen:
        model(x, x, x)
    assert "float32[1, 2, 5, 5]" in repr(seen)
    assert "None" not in repr(seen)
