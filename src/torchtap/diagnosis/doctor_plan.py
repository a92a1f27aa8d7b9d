"""The plan of a doctor: what to record, and how often, so that every rule can judge within a stated budget."""

from __future__ import annotations

from torch import nn

from torchtap._torch import RunningNorm
from torchtap._torch_distributed import fsdp_sharded
from torchtap.plan.names import site_name
from torchtap.plan.next_live import Pace, Seldom
from torchtap.plan.sites import places
from torchtap.plan.tap import Tap, tap
from torchtap.rank_identity import identity
from torchtap.reduce import Fingerprint, SampleSpread, Units

__all__ = ["doctor_taps"]

_OF_PARAMETERS = ("param", "param_grad", "update")
_COPIES = 16
_LARGEST_COPY = 1 << 22  # elements
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def doctor_taps(model: nn.Module, pace: Pace, roots: tuple[str, ...] = ("",)) -> list[Tap]:
    """Taps for all rules; ``roots`` are the paths of the models that are called.

    Of the first steps, which are all looked at, not all is read: gradients of outputs, which are as large as these, in
    one of two; parameters, which change little, and what the optimizer did to them, which takes a copy, in one of four.
    """
    alone = identity().world == 1
    second = Seldom(pace, 2)
    seldom = Seldom(pace, 4) if alone else pace  # ranks are compared by what they hold at each step
    taps = [tap("*:output", when=pace), tap("*:grad_output", when=second)]
    if _has_parameters(model):
        taps.append(tap("*:param_grad", when=pace))
        taps += [tap(f"*:{kind}", when=seldom) for kind in ("param", "update")]
    taps.append(tap(":lr", when=pace))
    for root in roots:
        taps += [tap(f"{root}:input", when=pace), tap(f"{root}:input", SampleSpread(), when=pace)]
        taps.append(tap(f"{root}:output", SampleSpread(), when=pace))
    layers = [kind for kind in _LAYERS if any(isinstance(module, kind) for module in model.modules())]
    if layers:
        taps.append(tap(layers, Units(dim=0, which=False), kind="param_grad", when=second))
    return [*taps, *(_running_statistics(model, seldom) if alone else _among_ranks(model, pace))]


def _running_statistics(model: nn.Module, pace: Pace | Seldom) -> list[Tap]:
    """What norms have gathered, where there are any."""
    norms = [each for each in model.modules() if isinstance(each, RunningNorm) and each.track_running_stats]
    kinds = list(dict.fromkeys(map(type, norms)))
    return [tap(kinds, kind="buffer", when=pace)] if kinds else []


def _among_ranks(model: nn.Module, pace: Pace) -> list[Tap]:
    """What tells ranks from each other: fingerprints of what they hold alike, and gradients before they are reduced."""
    taps = []
    if _has_parameters(model):
        taps += [tap(f"*:{kind}", Fingerprint(), when=pace) for kind in _OF_PARAMETERS]
        local = _some_local_gradients(model)
        if local:
            taps += [tap(local, when=pace), tap(local, Fingerprint(), when=pace)]
    if any(True for _ in model.buffers()):
        taps.append(tap("*:buffer", when=pace))
    return taps


def _some_local_gradients(model: nn.Module) -> list[str]:
    """Gradients before ranks average them, of a few parameters that are spread over the model: each is copied for it.

    FSDP hands out reduced gradients alone.
    """
    if fsdp_sharded(model):
        return []
    found = [
        site_name(place.path, "param_grad_local", leaf)
        for place in places(model)
        for leaf, parameter in place.module._parameters.items()
        if parameter is not None and parameter.requires_grad and parameter.numel() <= _LARGEST_COPY
    ]
    return found[:: max(1, -(-len(found) // _COPIES))]


def _has_parameters(model: nn.Module) -> bool:
    return any(True for _ in model.parameters())
