"""What a plan expected and did not get, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, final

from torch import nn

from torchtap._torch import something_was_compiled
from torchtap.plan.names import KINDS, OF_CALLS, belongs_to, is_unplaced, path_parts
from torchtap.plan.sites import unwrap
from torchtap.receive import reasons
from torchtap.receive.receiver import PortState, Receiver
from torchtap.sanitize import shown

__all__ = ["Missing", "missing_sites", "replaced_paths"]


@final
class Missing(NamedTuple):
    """A site without a value."""

    site: str
    reason: str

    def __str__(self) -> str:
        return shown(f"{self.site}: {self.reason}", 2000)


def missing_sites(receiver: Receiver, ever_live: frozenset[int]) -> list[Missing]:
    """Every place of the plan from which no value arrived, in the plan's order."""
    known = [Missing(site, reason) for site, reason in receiver.form.missing.items()]
    return [
        *known,
        *_silent_ports(receiver, ever_live),
        *_silent_insides(receiver, ever_live),
        *_forgotten(receiver, ever_live),
        *_idle_taps(receiver, ever_live),
    ]


def _silent_ports(receiver: Receiver, ever_live: frozenset[int]) -> Iterator[Missing]:
    replaced = replaced_paths(receiver)
    for port in receiver.ports.values():
        site = port.port.site.name
        if _came_before(receiver, port):
            continue
        if any(belongs_to(each, site) for each in receiver.form.missing) and not port.arrived:
            continue  # it was listed already, leaf by leaf
        if port.port.site.path in replaced:
            yield Missing(site, reasons.REPLACED)
            continue
        if port.kind in ("attention", "value"):
            continue
        if not port.arrived:
            yield Missing(site, _why_silent(receiver, port, ever_live))
        elif numbered := _only_numbered(port):
            yield Missing(site, reasons.UNPLACED.format(names=", ".join(numbered)))


# What is read when a step ends, and why it was not.
_AT_A_STEP: dict[str, str] = {
    **dict.fromkeys(("update", "optim_state", "lr"), reasons.NO_OPTIMIZER_STEP),
    **dict.fromkeys([kind for kind in KINDS if kind.startswith("param")], reasons.NO_STEP_ENDED),
    "buffer": reasons.NO_STEP_ENDED,
}


def _why_silent(receiver: Receiver, port: PortState, ever_live: frozenset[int]) -> str:
    """Why nothing came from a place that the model has."""
    if ever_live.isdisjoint(port.port.taps):
        return reasons.OFF_SCHEDULE
    if port.note:
        return port.note
    if port.kind in _AT_A_STEP:
        return _AT_A_STEP[port.kind]
    if port.kind.startswith("grad"):
        went_by = any(entry is not None for entry in port.sites.values())
        return reasons.NO_BACKWARD if went_by or port.called else _why_not_called(receiver, port)
    return reasons.NO_LEAF if port.called else _why_not_called(receiver, port)


def replaced_paths(receiver: Receiver) -> set[str]:
    """Where the model has another module than the one that taps were put on, or none."""
    root, *rest = receiver.plan.places
    return {place.path for place in rest if _now_at(root.module, place.path) is not place.module.__dict__}


def _now_at(root: nn.Module, path: str) -> dict[str, object] | None:
    """The state of the module that is now at a path. A wrapper shares the ``__dict__`` of the module inside it."""
    module: nn.Module | None = root
    for name in path_parts(path):
        module = unwrap(module)._modules.get(name) if module is not None else None
    return None if module is None else unwrap(module).__dict__


def _why_not_called(receiver: Receiver, port: PortState) -> str:
    module = port.port.site.module
    if (
        module is not None
        and type(module).forward is nn.Module.forward
        and not hasattr(module, "_torchtap_stand_in")
    ):
        return reasons.NO_FORWARD.format(name=type(module).__name__)
    path = port.port.site.path
    if any(other.arrived for other in receiver.ports.values() if other.port.site.path == path):
        return reasons.NO_KIND
    if receiver.totals.passes == 0 and something_was_compiled():
        return reasons.NOT_CALLED_OR_COMPILED
    return reasons.NOT_CALLED


def _silent_insides(receiver: Receiver, ever_live: frozenset[int]) -> Iterator[Missing]:
    """Attention maps and named values come from somewhere inside: a tap is content with any of its modules."""
    never_seen = {"attention": reasons.NO_ATTENTION, "value": reasons.NO_VALUE}
    for (index, tap), kind in product(enumerate(receiver.plan.asked), never_seen):
        asked = _asked_by(receiver, index, kind)
        if not asked or any(port.arrived or _came_before(receiver, port) for port in asked):
            continue
        name = next((s.text for s in tap.selectors if kind in s.kinds), kind)
        note = next((port.note for port in asked if port.note), never_seen[kind])
        yield Missing(name, note if index in ever_live else reasons.OFF_SCHEDULE)


def _idle_taps(receiver: Receiver, ever_live: frozenset[int]) -> Iterator[Missing]:
    """Taps that were never live, though other taps brought something from each of their sites."""
    for index, tap in enumerate(receiver.plan.asked):
        ports = [port for port in receiver.ports.values() if index in port.port.taps]
        if index not in ever_live and ports and all(port.arrived for port in ports):
            yield Missing(", ".join(selector.text for selector in tap.selectors), reasons.IDLE_TAP)


def _asked_by(receiver: Receiver, tap: int, kind: str) -> list[PortState]:
    return [port for port in receiver.ports.values() if tap in port.port.taps and port.kind == kind]


def _came_before(receiver: Receiver, port: PortState) -> bool:
    """Whether it came before the model was changed."""
    return port.port.site.name in receiver.totals.arrived_before


def _only_numbered(port: PortState) -> list[str]:
    """The sites of a port from which only numbered tensors came."""
    found = [entry for entry in port.sites.values() if entry is not None and entry.shape is not None]
    return [entry.name for entry in found] if all(is_unplaced(entry.site.leaf) for entry in found) else []


def _forgotten(receiver: Receiver, ever_live: frozenset[int]) -> list[Missing]:
    """One entry for all that a form may have forgotten, if a selector may mean more than the form knows."""
    if not receiver.form.unnamed_reason:
        return []
    known = {place.path for place in receiver.plan.places}
    for index, tap in enumerate(receiver.plan.asked):
        asked = any(index in port.port.taps and port.kind in OF_CALLS for port in receiver.ports.values())
        open_ended = [each.text for each in tap.selectors if each.plain_path not in known]
        if asked and open_ended and index in ever_live:
            return [Missing(open_ended[0], receiver.form.unnamed_reason)]
    return []
