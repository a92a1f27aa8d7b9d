"""Outputs of any structure: each tensor in them is monitored."""

from __future__ import annotations

import pytest
import torch
from tests.models import Dataclassed, Structured, Tagger
from tests.monitors.module_monitoring import watching
from torch import nn


def test_the_tensors_of_tuple_outputs_are_monitored_one_by_one() -> None:
    model, x = Tagger(), torch.randn(2, 5, 8)
    monitor = watching(model)
    monitor.begin_step(0)
    model(x)
    monitor.end_step()
    output, (hidden, cell) = model.lstm(x)
    got = monitor.get_step_metrics()
    for key, value in {"lstm[0]": output, "lstm[1.0]": hidden, "lstm[1.1]": cell}.items():
        assert got[f"activation/{key}/norm"] == pytest.approx(value.norm().item(), rel=1e-5)


def test_the_tensors_of_dict_and_dataclass_outputs_are_monitored() -> None:
    model = nn.ModuleDict({"whole": Structured(), "part": Dataclassed()})
    monitor = watching(model)
    monitor.begin_step(0)
    model["whole"]({"x": torch.randn(2, 6), "mask": torch.ones(2, 6)})
    out = model["part"](torch.randn(2, 6))
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation/part[logits]/mean"] == pytest.approx(out.logits.mean().item(), rel=1e-5)
    assert "activation/part[hidden.1]/mean" in got
    assert "activation/whole[logits]/norm" in got


def test_multihead_attention_is_not_skipped() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = watching(model)
    monitor.begin_step(0)
    x = torch.randn(2, 3, 8)
    model(x, x, x)
    monitor.end_step()
    assert {"activation/[root module][0]/mean", "activation/[root module][1]/mean"} <= set(
        monitor.get_step_metrics()
    )
