"""The refined coordinate check on a part of each batch gives what that part alone gives."""

from __future__ import annotations

import pytest
import torch
from tests.models import GPT, mlp
from tests.monitors.coordinate_checks import MODELS, checking
from torch import Tensor, nn

from torchtap import ModuleMonitor, RefinedCoordinateCheck
from torchtap.errors import MonitorError


class BatchSecond(nn.Module):
    """Positions first, then samples, as transformers of torch have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(0, 1)
        mixed: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return mixed.flatten(0, 1)


PARTS = {
    **{
        name: MODELS[name]
        for name in ("mlp", "nested", "tuples", "changed in place", "changed inside", "half")
    },
    "gpt": (GPT, lambda: torch.randint(0, 11, (8, 6))),
    "batch second": (BatchSecond, lambda: torch.randn(8, 5, 8)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_batch_gives_exactly_what_that_part_alone_gives(name: str) -> None:
    build, batch = PARTS[name]
    torch.manual_seed(0)
    monitor, reference, _ = checking(build().eval())
    model = monitor.module
    x = batch()
    monitor.remove_reference_module()
    found = []
    for share, given in ((0.4, lambda: x), (1.0, lambda: x[: -(-len(x) * 4 // 10)])):
        monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor, share=share)
        monitor.begin_step(0)
        with monitor.no_monitor():
            reference(check.part(given()))
        model(given())
        check.refined_coordinate_check()
        monitor.end_step()
        metrics = monitor.get_step_metrics()
        found.append({key: value for key, value in metrics.items() if key.startswith("RCC")})
        monitor.remove_reference_module()
        monitor.activation_hooks.remove_all_hooks()
        check.rcc_forward_hooks.remove_all_hooks()
    part, alone = found
    assert part.keys() == alone.keys()
    assert part
    for key, value in part.items():
        # What a layer makes of some rows may differ in the last bits from what it makes of them among others.
        assert value == pytest.approx(alone[key], rel=2e-2 if name == "half" else 1e-4, abs=1e-5), key


def test_a_part_of_a_batch_is_refused_where_it_tells_nothing_of_the_whole() -> None:
    with pytest.raises(MonitorError, match="share=0"):
        RefinedCoordinateCheck(checking(mlp())[0], share=0)
    monitor, reference, _ = checking(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    check = RefinedCoordinateCheck(monitor, share=0.5)
    with pytest.raises(MonitorError, match=r"1 \(BatchNorm1d\) trains on the statistics"):
        monitor.begin_step(0)
    monitor.module.eval()
    monitor.begin_step(0)
    reference.eval()(check.part(torch.randn(4, 3)))
    with pytest.raises(MonitorError, match="has no part of shape"):
        monitor.module(torch.randn(1, 3))


def test_the_part_of_a_batch_is_its_first_rows() -> None:
    check = RefinedCoordinateCheck(checking(mlp())[0], share=1 / 8)
    batch = {"x": torch.arange(20), "pair": (torch.ones(3, 2), "text"), "none": None}
    part = check.part(batch)
    assert part["x"].tolist() == [0, 1, 2]
    assert part["pair"][0].shape == (1, 2)
    assert part["pair"][1] == "text"
    assert part["none"] is None
    whole = RefinedCoordinateCheck(checking(mlp())[0])
    assert whole.part(batch) is batch
