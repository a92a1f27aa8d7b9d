"""The layers and epochs that the document records, and a batch of its training."""

from __future__ import annotations

from types import SimpleNamespace

from tests.monitors.training import FFN, WEIGHTS
from torch import Tensor

from torchtap import Monitor

MONITOR_LAYERS = {
    WEIGHTS: {"alias": "attention_weights", "record_type": "single"},
    FFN: {"alias": "ffn_epoch_stats", "record_type": "epoch_full"},
}
MONITOR_EPOCHS = [1, 2]


def run_one_batch(monitor: Monitor, training: SimpleNamespace, epoch: int = 1) -> Tensor:
    monitor.set_epoch(epoch)
    monitor.set_batch_idx(0)
    tokens, _ = next(iter(training.loader))
    training.model(tokens)
    return tokens
