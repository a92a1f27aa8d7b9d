"""A callable that emits values of sites it lists itself: a compiled package, a graph with extra outputs.

Nothing is known of such a model but the names of its sites, so a plan binds to a skeleton of stand-in modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from torch import Tensor, nn

from torchtap.errors import FormError
from torchtap.forms.op import op
from torchtap.forms.op.forms import CarriedAttachment
from torchtap.forms.stand_ins import skeleton
from torchtap.receive import by_name
from torchtap.spi import Name, Receiver, reasons

__all__ = ["EmittingModel", "attach_emitting", "emitting_tree"]


@final
class EmittingModel:
    """Call it like the model that it was made from.

    ``call`` does the work and may bring ``(site, tensor)`` pairs through the function it is given first; values
    that come through the op while it runs are taken as well.
    """

    def __init__(
        self, call: Callable[..., object], sites: Sequence[str], *, brings: bool = False, about: str = ""
    ) -> None:
        op.register()
        self.torchtap_sites = tuple(sites)
        self.receivers: tuple[Receiver, ...] = ()
        self._call = call
        self._calls: dict[str, int] = {}  # of each module in a pass, as far as its sites tell
        for site in sites:
            path, _, _, number = Name.read(site)
            self._calls[path] = max(self._calls.get(path, 0), number + 1)
        self._brings = brings
        self._about = about

    def __call__(self, *args: object, **kwargs: object) -> Any:
        receivers = self.receivers
        for receiver in receivers:
            receiver.begin_pass()
            op.listen(receiver)
        try:
            return self._call(self._bring, *args, **kwargs) if self._brings else self._call(*args, **kwargs)
        finally:
            for receiver in receivers:
                op.stop_listening(receiver)
                receiver.end_pass()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._about or self._call!r}, {len(self.torchtap_sites)} sites)"

    def _bring(self, found: Iterable[tuple[str, Tensor]]) -> None:
        for receiver in self.receivers:
            if receiver.hears_this_thread():
                for site, tensor in found:
                    name = Name.parse(site)
                    place = by_name.Count(0, name.call, self._calls[name.path])
                    by_name.take(receiver, name.path, name.kind, name.leaf, tensor, place)


@final
class _Hearing:
    """While it is on, a receiver hears what the model emits."""

    def __init__(self, model: EmittingModel, receiver: Receiver) -> None:
        self._model = model
        self._receiver = receiver

    def switch_on(self) -> None:
        self._model.receivers = (*self._model.receivers, self._receiver)

    def switch_off(self) -> None:
        self._model.receivers = tuple(each for each in self._model.receivers if each is not self._receiver)


def emitting_tree(model: Any) -> nn.Module:
    """Stand-ins for the modules whose values a model emits."""
    _check(model)
    return skeleton(Name.read(site).path for site in model.torchtap_sites)


def attach_emitting(model: Any, receiver: Receiver) -> CarriedAttachment:
    """Put a plan on a model that emits."""
    _check(model)
    emitted = {Name.read(site)[:2] for site in model.torchtap_sites}
    for port in receiver.ports.values():
        if (port.port.site.path, port.kind) not in emitted:
            port.note = reasons.NOT_PUT_IN
    return CarriedAttachment(receiver, None, [_Hearing(model, receiver)])


def _check(model: object) -> None:
    if not isinstance(model, EmittingModel):
        raise FormError(
            "cannot tap an AOTInductor model that torch loaded: it does not tell its sites; load its package with "
            "tt.load(path), and put the sites in with tt.instrument before torch.export"
        )
