"""What a plan expected and did not get, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from torchtap.names import path_parts
from torchtap.sites import unwrap
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.receiver import Receiver

__all__ = ["Missing", "missing_sites", "replaced_paths"]


@final
@dataclass(frozen=True, slots=True)
class Missing:
    """A site from which nothing came."""

    site: str
    reason: str

    def __str__(self) -> str:
        return f"{self.site}: {self.reason}"


def missing_sites(receiver: Receiver, ever_live: frozenset[int]) -> list[Missing]:
    """Every place of the plan from which no value arrived, in the plan's order."""
    return [*_silent_ports(receiver, ever_live), *_silent_insides(receiver, ever_live)]


def _silent_ports(receiver: Receiver, ever_live: frozenset[int]) -> Iterator[Missing]:
    replaced = replaced_paths(receiver)
    for port in receiver.ports.values():
        site = port.port.site.name
        if port.port.site.path in replaced:
            yield Missing(site, "its module was replaced after the taps were put on; nothing came since then")
            continue
        if port.kind in ("attention", "value") or _arrived(port):
            continue
        if ever_live.isdisjoint(port.port.taps):
            yield Missing(site, "off schedule: no step was live for its taps")
        elif any(entry is not None for entry in port.entries.values()) and port.kind.startswith("grad"):
            yield Missing(site, port.note or "no backward pass reached it")
        elif port.note:
            yield Missing(site, port.note)
        elif port.kind in ("update", "optim_state", "lr"):
            yield Missing(site, "no optimizer stepped with it while it was live")
        elif port.kind.startswith("param") or port.kind == "buffer":
            yield Missing(site, "no step ended while it was live")
        elif not port.called:
            yield Missing(site, _why_not_called(receiver, port))
        elif port.kind.startswith("grad"):
            yield Missing(site, "no backward pass reached it")
        else:
            yield Missing(site, "none of its leaves is one that the selector picks")


def replaced_paths(receiver: Receiver) -> set[str]:
    """Where the model has another module than the one that taps were put on, or none."""
    root, *rest = receiver.plan.places
    return {place.path for place in rest if _now_at(root.module, place.path) is not place.module.__dict__}


def _now_at(root: nn.Module, path: str) -> dict[str, Any] | None:
    """The state of the module that is now at a path: a wrapper of ours is a second face with the same."""
    module: nn.Module | None = root
    for name in path_parts(path):
        module = unwrap(module)._modules.get(name) if module is not None else None
    return None if module is None else unwrap(module).__dict__


def _why_not_called(receiver: Receiver, port: LivePort) -> str:
    module = port.port.site.module
    if module is not None and type(module).forward is nn.Module.forward:
        return f"a {type(module).__name__} has no forward: it holds modules and is not called itself"
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if receiver.passes == 0 and compiler is not None and compiler.FRAME_COUNTER:
        return (
            "module not called, or called in code that torch.compile made before these taps were on: "
            "give torchtap the compiled model, or call torch.compiler.reset() after putting taps on"
        )
    return "module not called"


def _silent_insides(receiver: Receiver, ever_live: frozenset[int]) -> Iterator[Missing]:
    """Attention maps and named values come from somewhere inside: a tap is content with any of its modules."""
    for index, tap in enumerate(receiver.plan.asked):
        ports = [
            port
            for port in receiver.ports.values()
            if index in port.port.taps and port.kind in ("attention", "value")
        ]
        for kind in ("attention", "value"):
            asked = [port for port in ports if port.kind == kind]
            if not asked or any(_arrived(port) for port in asked):
                continue
            name = next((s.text for s in tap.selectors if kind in s.kinds), kind)
            notes = [port.note for port in asked if port.note]
            if index not in ever_live:
                yield Missing(name, "off schedule: no step was live for its tap")
            elif notes:
                yield Missing(name, notes[0])
            elif kind == "attention":
                yield Missing(
                    name,
                    "no call of a fused attention function was seen inside these modules; attention that is "
                    "written out in Python is not (transformers has attn_implementation='sdpa')",
                )
            else:
                yield Missing(name, "no torchtap.emit() with this name ran inside these modules")


def _arrived(port: LivePort) -> bool:
    return any(entry is not None and entry.shape is not None for entry in port.entries.values())
