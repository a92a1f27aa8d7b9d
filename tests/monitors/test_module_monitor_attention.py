"""Attention without touching the model: head by head, against attention written out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.models import GPT
from torch import Tensor, nn
from torch.nn import functional

import torchtap as tt
from torchtap import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention
from torchtap.monitors import attention_heads
from torchtap.monitors.attention_heads import head_entropy
from torchtap.receive.attention import AttentionCall, listen


def watching(model: nn.Module, **options: Any) -> ModuleMonitor:
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True, **options)
    monitor.set_module(model)
    monitor.add_activation_metric("norm", lambda x: x.norm())
    return monitor


def written_out(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The weights, (batch, heads, queries, keys), in double."""
    q, k = q.double(), k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)


def entropy(weights: Tensor) -> Tensor:
    return -(weights * (weights + 1e-8).log()).sum(-1)


class Attending(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.options = heads, key_heads, options
        self.q, self.k = nn.Linear(16, heads * 4), nn.Linear(16, key_heads * 4)
        self.v, self.o = nn.Linear(16, key_heads * 4), nn.Linear(heads * 4, 16)

    def parts(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        k = self.k(context).unflatten(-1, (self.key_heads, 4)).transpose(1, 2)
        return q, k, self.v(context).unflatten(-1, (self.key_heads, 4)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = functional.scaled_dot_product_attention(*self.parts(x, context), **self.options)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 5),
        ({"is_causal": True}, 5),
        ({"scale": 0.7}, 5),
        ({"attn_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(1)}, 5),
        ({"attn_mask": torch.linspace(-1, 1, 100).reshape(4, 5, 5)}, 5),
        ({"enable_gqa": True}, 5),
        ({}, 9),
        ({"dropout_p": 0.5}, 5),
    ],
    ids=["plain", "causal", "scaled", "hidden", "biased", "grouped", "crossed", "dropped"],
)
def test_heads_of_scaled_dot_product_attention(options: dict[str, Any], length: int) -> None:
    model = nn.Sequential()
    model.attention = Attending(key_heads=2 if options.get("enable_gqa") else 4, **options)
    monitor = watching(model, attention=True)
    x, context = torch.randn(2, 5, 16), torch.randn(2, length, 16)
    torch.manual_seed(1)
    monitor.begin_step(0)
    model.attention(x, context)
    monitor.end_step()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    model.attention(x, context)
    assert torch.equal(torch.get_rng_state(), after), "monitoring used up random numbers"
    got = monitor.get_step_metrics()
    q, k, v = model.attention.parts(x, context)
    weights = written_out(
        q, k, options.get("attn_mask"), options.get("is_causal", False), options.get("scale")
    )
    out = weights @ v.double().repeat_interleave(4 // v.shape[1], 1)
    for head in range(4):
        shared = head * k.shape[1] // 4
        name = f"attention.head_{head}"
        assert got[f"attention_entropy/{name}"] == pytest.approx(
            entropy(weights[:, head]).mean().item(), rel=1e-5
        )
        assert got[f"activation/{name}.query/norm"] == pytest.approx(q[:, head].norm().item(), rel=1e-5)
        assert got[f"activation/{name}.key/norm"] == pytest.approx(k[:, shared].norm().item(), rel=1e-5)
        assert got[f"activation/{name}.value/norm"] == pytest.approx(v[:, shared].norm().item(), rel=1e-5)
        if "dropout_p" not in options:
            assert got[f"activation/{name}.activation/norm"] == pytest.approx(
                out[:, head].norm().item(), rel=1e-4
            )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"masked": True}, {"padded": True}])
def test_heads_of_multihead_attention(options: dict[str, Any], training: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    monitor = watching(model, attention=True)
    x = torch.randn(3, 5, 8)
    call: dict[str, Any] = {"need_weights": True, "average_attn_weights": False}
    call.update({key: value for key, value in options.items() if key == "need_weights"})
    if options.get("masked"):
        call["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if options.get("padded"):
        call["key_padding_mask"] = torch.arange(5).expand(3, 5) > 3
    monitor.begin_step(0)
    with torch.set_grad_enabled(training):
        model(x, x, x, **call)
    monitor.end_step()
    got = monitor.get_step_metrics()
    weights = model(x, x, x, **{**call, "need_weights": True, "average_attn_weights": False})[1].double()
    value = functional.linear(x, model.in_proj_weight[16:], model.in_proj_bias[16:]).unflatten(-1, (2, 4))
    out = weights @ value.transpose(1, 2).double()
    for head in range(2):
        name = f"[root module].head_{head}"
        assert got[f"attention_entropy/{name}"] == pytest.approx(
            entropy(weights[:, head]).mean().item(), rel=1e-4
        )
        assert got[f"activation/{name}.activation/norm"] == pytest.approx(
            out[:, head].norm().item(), rel=1e-4
        )
        assert got[f"activation/{name}.value/norm"] == pytest.approx(
            value[:, :, head].norm().item(), rel=1e-5
        )


def test_attention_is_asked_for_by_module_and_left_alone_between_steps() -> None:
    model = GPT(layers=2)
    original = functional.scaled_dot_product_attention
    monitor = watching(model, attention=r"blocks\.1")
    monitor.begin_step(0)
    assert functional.scaled_dot_product_attention is not original
    model(torch.randint(0, 11, (2, 6)))
    monitor.end_step()
    assert functional.scaled_dot_product_attention is original
    heads = [key for key in monitor.get_step_metrics() if key.startswith("attention_entropy/")]
    assert heads == [f"attention_entropy/blocks.1.attn.head_{head}" for head in range(4)]


def test_the_reference_does_not_mix_into_the_models_entropy() -> None:
    class Own(Attending, MonitorMixin):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            q, k, v = self.parts(x)
            if self.module_monitor is not None:
                monitor_scaled_dot_product_attention(self.module_monitor, self, q, k, v)
            return self.o((q * k).transpose(1, 2).flatten(2))

    model = nn.Sequential(Own())
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference[0].q.weight.mul_(20)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    x = torch.randn(2, 5, 16)
    monitor.begin_step(0)
    reference(x)
    model(x)
    monitor.end_step()
    q, k, _ = model[0].parts(x)
    expected = entropy(written_out(q, k, None, False, None)[:, 0]).mean().item()
    got = monitor.get_step_metrics()
    assert got["attention_entropy/0.head_0"] == pytest.approx(expected, rel=1e-5)
    assert got["activation_difference/0.head_0.key/norm"] == 0
    assert got["activation_difference/0.head_0.query/norm"] > 0


def test_a_long_sequence_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = [0]
    softmax = torch.softmax

    def watched(scores: Tensor, dim: int) -> Tensor:
        largest[0] = max(largest[0], scores.numel())
        return softmax(scores, dim=dim)

    monkeypatch.setattr(attention_heads.torch, "softmax", watched)
    q, k = torch.randn(1, 1, 8192, 4), torch.randn(1, 1, 8192, 4)
    mask = torch.ones(8192, 8192, dtype=torch.bool).tril()
    got = head_entropy(q, k, 0, is_causal=True)
    assert largest[0] <= 1 << 22
    assert got.shape == (1, 8192)
    some = written_out(q[:, :, :300], k[:, :, :300], mask[:300, :300], False, None)[0, 0]
    assert torch.allclose(got[0, :300].double(), entropy(some), rtol=1e-4, atol=1e-5)


def test_a_query_that_may_see_no_key_has_no_entropy() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    got = head_entropy(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), 0, mask)
    assert got[0, 0] == 0
    assert got.isfinite().all()


def test_keys_of_another_length_are_warned_about_in_a_modules_own_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Identity()
    monitor = watching(model)
    monitor.begin_step(0)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    monitor_scaled_dot_product_attention(monitor, "cross", q, k, k)
    monitor.end_step()
    assert "assumes that S == L" in caplog.text
    assert monitor.get_step_metrics() == {}


def test_a_capture_of_attention_in_the_same_step_disturbs_nothing() -> None:
    model, original = GPT(layers=1), functional.scaled_dot_product_attention
    tokens = torch.randint(0, 11, (2, 6))
    monitor = watching(model, attention=True)
    for outer in (True, False):
        with tt.capture(model, "blocks.0.attn:attention") as seen:
            monitor.begin_step(0 if outer else 1)
            model(tokens)
            if outer:
                monitor.end_step()
        if not outer:
            monitor.end_step()
        assert functional.scaled_dot_product_attention is original
        assert len(seen) == 1
        assert "attention_entropy/blocks.0.attn.head_3" in monitor.get_step_metrics()


@pytest.mark.parametrize("enabled", [True, False])
def test_torch_s_fast_path_is_left_as_it_is_and_its_attention_is_seen(enabled: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    model, x = nn.Sequential(layer), torch.randn(3, 5, 8)
    monitor = watching(model, attention=True)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        monitor.begin_step(0)
        with torch.no_grad():
            model(x)
        assert torch.backends.mha.get_fastpath_enabled() == enabled
        monitor.end_step()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    source = layer.norm1(x)
    weights = layer.self_attn(source, source, source, average_attn_weights=False)[1]
    got = {key: value for key, value in monitor.get_step_metrics().items() if "entropy" in key}
    assert list(got.values()) == pytest.approx(
        [entropy(weights[:, head].double()).mean().item() for head in range(2)], rel=1e-4
    )


@pytest.mark.parametrize("training", [True, False])
def test_every_way_into_attention_gives_the_heads_the_same_values(training: bool) -> None:
    """The four entry points, with nothing on the model that would keep torch from its fast paths."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    model, x = nn.Sequential(layer), torch.randn(3, 5, 8)
    calls: list[AttentionCall] = []
    listening = listen(calls.append)
    try:
        with torch.set_grad_enabled(training):
            model(x)
            layer.self_attn(x, x, x, need_weights=False)
    finally:
        listening.remove()
    q, k, v = (
        part.unflatten(-1, (2, 4)).transpose(1, 2)
        for part in functional.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(
            3, -1
        )
    )
    assert len(calls) == 2
    for call in calls:
        assert call.arguments is not None
        assert torch.allclose(call.arguments[0], q, atol=1e-6)
        assert torch.allclose(call.arguments[1], k, atol=1e-6)
        assert torch.allclose(call.value, v, atol=1e-6)
        assert torch.allclose(call.by_head(), functional.scaled_dot_product_attention(q, k, v), atol=1e-6)


def test_a_monitor_that_is_dropped_in_a_step_takes_its_wrappers_along() -> None:
    import gc

    original = functional.scaled_dot_product_attention
    monitor = ModuleMonitor(None, attention=True)
    monitor.set_module(nn.Linear(2, 2))
    monitor.begin_step(0)
    assert functional.scaled_dot_product_attention is not original
    del monitor
    gc.collect()
    assert functional.scaled_dot_product_attention is original


def test_whoever_wraps_attention_in_a_monitored_step_keeps_it_and_nothing_is_counted_twice() -> None:
    original = functional.scaled_dot_product_attention
    model = GPT(layers=1)
    monitor = watching(model, attention=True)
    monitor.begin_step(0)
    ours = functional.scaled_dot_product_attention
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return ours(*args, **kwargs)

    functional.scaled_dot_product_attention = theirs
    try:
        monitor.end_step()
        assert functional.scaled_dot_product_attention is theirs
        heard: list[AttentionCall] = []
        listening = listen(heard.append)
        model(torch.randint(0, 11, (2, 6)))
        listening.remove()
        assert functional.scaled_dot_product_attention is theirs
        assert (len(calls), len(heard)) == (1, 1)
    finally:
        functional.scaled_dot_product_attention = original
