"""A plan on a model: what `capture` and `watch` have in common. It listens, folds, and lets go of the model again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from torchtap.forms.attach import attach
from torchtap.hooks.hooks import WayName
from torchtap.plan.names import OF_CALLS
from torchtap.plan.plan import Plan
from torchtap.receive.collect import Collected, Collector
from torchtap.receive.eager import EagerAttachment
from torchtap.receive.receiver import Receiver
from torchtap.store.record import ScalarBlock

if TYPE_CHECKING:
    from torchtap.forms.match.site_map import SiteMap
    from torchtap.forms.op.passes import PassHooks
    from torchtap.receive.placing import Placing
    from torchtap.receive.receiver import PassClock

__all__ = ["AttachedPlan"]


@final
class AttachedPlan:
    """A receiver, an attachment to the model in its form, and what empties the receiver."""

    def __init__(
        self,
        model: object,
        plan: Plan,
        *,
        strict: bool,
        copy: Callable[[Tensor], Tensor],
        on_lost: Callable[[str], None],
        models: Mapping[str, Any] | None = None,
        way: WayName = "hook",
        apart: frozenset[int] = frozenset(),
        clock: PassClock | None = None,
        site_map: SiteMap | None = None,
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self.receiver = Receiver(
            plan, apart=apart, strict=strict, copy=copy, on_lost=on_lost, clock=clock, placing=placing
        )
        self._among_ranks = placing is not None
        self._attachment = attach(model, self.receiver, way, site_map)
        self._members = [] if models is None else self._each_called(models)
        self._hears_members = False
        self.armed: frozenset[int] = frozenset()

    def _each_called(self, models: Mapping[str, Any]) -> list[PassHooks]:
        """Of several models each call is a pass; what holds them together is never called."""
        from torchtap.forms.op.passes import PassHooks

        return [PassHooks(each, self.receiver) for each in models.values()]

    @cached_property
    def _collector(self) -> Collector:
        return Collector(self.receiver.accumulator, among_ranks=self._among_ranks)

    def collect(self, keys: Sequence[str], live: frozenset[int], phase: str) -> tuple[int, Collected]:
        """Return the passes and the values that these phases hold for some taps; they are empty afterwards."""
        phases = self.receiver.accumulator.phases
        held = [phases[key] for key in keys if key in phases]
        if self.receiver.placing is not None:
            for key in keys:
                self.receiver.placing.relabel(key, phase)
        passes = sum(each.passes for each in held)
        return passes, self._collector.collect(held, live)

    def arm(self, live: frozenset[int]) -> None:
        """Have the model bring what these taps ask for."""
        self.armed = live
        self._attachment.arm(live)
        if self._members and self._hears_members != bool(live):
            self._hear_members(bool(live))

    def _hear_members(self, wanted: bool) -> None:
        self._hears_members = wanted
        for hooks in self._members:
            hooks.switch_on() if wanted else hooks.switch_off()

    def hooks_gone(self) -> list[nn.Module]:
        """The modules from which somebody else has taken our hooks off."""
        return self._attachment.hooks_gone() if isinstance(self._attachment, EagerAttachment) else []

    def places_replaced(self) -> list[str]:
        """Where the model has another module than the one that taps were put on, or none. Asked when it has changed."""
        from torchtap.session.coverage import replaced_paths

        return sorted(replaced_paths(self.receiver))

    def read_state(self) -> None:
        """The step is over: take what is read at its end."""
        self._attachment.finish_step()

    @property
    def listens_to_passes(self) -> bool:
        """Whether any live tap wants what only a pass brings."""
        ports = (port for port in self.plan.ports if not self.armed.isdisjoint(port.taps))
        return any(port.site.kind in OF_CALLS for port in ports)

    def drop(self, key: str) -> int:
        """Forget what a phase holds. Returns its passes."""
        phase = self.receiver.accumulator.phases.get(key)
        if phase is None:
            return 0
        passes = phase.passes
        self.receiver.accumulator.drop(phase)
        return passes

    def peek(self, keys: Sequence[str]) -> tuple[int, ScalarBlock | None]:
        """Return the passes and the statistics that phases hold so far."""
        phases = self.receiver.accumulator.phases
        held = [phases[key] for key in keys if key in phases]
        return sum(each.passes for each in held), self._collector.peek(held, self.armed)

    def detach(self) -> None:
        """Leave the model as it was found."""
        if self._hears_members:
            self._hear_members(False)
        self._attachment.detach()
