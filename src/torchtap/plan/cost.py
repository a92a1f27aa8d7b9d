"""Estimate what a plan costs before anything runs: memory, disk and time of one recorded step.

Sizes of parameters and buffers are those of the model. Sizes of activations are not known before a pass; `Plan.cost`
takes them from a capture or another mapping of sites to tensors, and names the kinds that it could not count. The size
of what a reduction keeps is found by reducing a tensor of that size (at most 64 Ki elements), and so is its time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from torchtap.plan.budget import allowance
from torchtap.plan.names import read_name
from torchtap.reduce.reduction import AnyReduction
from torchtap.reduce.stats import StatsBlock
from torchtap.schedule.base import Never

if TYPE_CHECKING:
    from torchtap.plan.plan import Plan

__all__ = ["Cost", "cost_of"]

_MOST = 1 << 16  # elements of a tensor that is reduced for the estimate
_NUMBER = 8  # bytes of a number on disk
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_BLOCK = 10 << 20  # bytes that a rehearsed update needs at a time


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What one recorded step of a plan costs.

    sites: values that are recorded.
    device: bytes that are held on the model's device while the step runs.
    host: bytes that are held in main memory until they are written.
    disk: bytes in the run folder.
    seconds: time that the step takes longer, estimated on this machine.
    unknown: kinds whose sizes are not known before the model runs; they are not in the figures above.
    """

    sites: int
    device: int
    host: int
    disk: int
    seconds: float
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"each recorded step: {self.sites:,} values",
            f"  device memory  {_size(self.device)}",
            f"  host memory    {_size(self.host)}",
            f"  disk           {_size(self.disk)}",
            f"  time           about {self.seconds * 1000:.1f} ms on this machine",
        ]
        if self.unknown:
            lines.append(f"  not counted    {', '.join(self.unknown)}: known after a pass, see Plan.cost")
        return "\n".join(lines)


def cost_of(plan: Plan, values: Mapping[str, Any]) -> Cost:
    """Estimate the cost of one step in which every tap of a plan is active."""
    shapes = _sizes_of(values)
    kept: dict[tuple[str, int, torch.dtype], tuple[int, float]] = {}
    sites = device = host = disk = 0
    seconds, unknown, updates = 0.0, dict[str, None](), 0
    for port in plan.ports:
        site = port.site
        holder = _tensor_of(site.module, site.leaf)
        found = [holder] if holder is not None else shapes.get((site.path, site.kind), [])
        if not found and site.kind != "lr" and not isinstance(site.module, _NEVER_CALLED):
            unknown[site.kind] = None
        asked = {
            repr(plan.taps[index].keep): plan.taps[index].keep
            for index in port.taps
            if not isinstance(plan.taps[index].schedule, Never)
        }
        for each in found:
            sites += 1
            nbytes = each.numel() * each.element_size()
            updates += nbytes if site.kind == "update" else 0
            for name, keep in asked.items():
                size = min(each.numel(), _MOST)
                key = name, size, each.dtype
                if key not in kept:
                    kept[key] = _try(keep, size, each.dtype)
                result, cost = kept[key]
                whole = nbytes if keep.whole else result
                disk += whole
                host += whole
                device += whole if each.device.type != "cpu" else 0
                seconds += cost * max(1.0, each.numel() / _MOST)
    device += _updates(updates, plan)
    return Cost(sites, device, host, disk, seconds, tuple(unknown))


def _sizes_of(values: Mapping[str, Any]) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors of a capture by path and kind. A gradient has the size of its value."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            site = read_name(name)
            found.setdefault((site.path, site.kind), []).append(value)
    for (path, kind), tensors in list(found.items()):
        if kind in ("input", "output"):
            found.setdefault((path, f"grad_{kind}"), tensors)
    return found


def _tensor_of(module: Any, leaf: str) -> Tensor | None:
    """Return the parameter or buffer that a site names."""
    if module is None or not leaf:
        return None
    for table in (module._parameters, module._buffers):
        tensor: Tensor | None = table.get(leaf)
        if tensor is not None:
            return tensor
    return None


def _updates(nbytes: int, plan: Plan) -> int:
    """Return the bytes that measuring updates holds: copies, or blocks if copies are more than the allowance."""
    if not nbytes:
        return 0
    parameters = {
        id(each): each.numel() * each.element_size()
        for place in plan.places
        for each in place.module._parameters.values()
        if each is not None
    }
    return nbytes if nbytes <= allowance(sum(parameters.values())) // 2 else _BLOCK


def _try(keep: AnyReduction, size: int, dtype: torch.dtype) -> tuple[int, float]:
    """Return the bytes of a reduction's result and the seconds that it takes, for a tensor of so many elements."""
    value = torch.zeros(size).to(dtype)
    if keep.in_rows:
        block = StatsBlock(1, scratch=1)
        seconds = _timed(lambda: block.measure_into(0, 0, value))
        return len(block.statistics) * _NUMBER, seconds
    state = keep.update(None, value)
    seconds = _timed(lambda: keep.update(None, value))
    result = keep.result(state)
    return sum(
        each.numel() * each.element_size() if isinstance(each, Tensor) else _NUMBER
        for each in result.values()
    ), seconds


def _timed(call: Any) -> float:
    """Return the shortest of three times."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _size(nbytes: int) -> str:
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
