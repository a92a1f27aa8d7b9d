"""Notice what would stay silent: modules that come, go or are replaced under a watch, and hooks that others took off.

One look at the start of a step: children are compared by identity, a hook by its number in torch's own table. Only when
something differs, the plan is bound again to see which sites it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from torch import nn

from torchtap.errors import TorchtapError
from torchtap.foreign_text import shown
from torchtap.plan import Plan, bind
from torchtap.sites import unwrap
from torchtap.tapping import Tapping
from torchtap.taps.attach import tree_of

__all__ = ["Gaps"]

_NAMED = 3


@final
class Gaps:
    """Looks after the modules of a model and the hooks on them, and tells each change once."""

    def __init__(
        self, model: Any, members: Iterable[Any], plan: Plan, taps: Tapping, tell: Callable[[str], None]
    ) -> None:
        self._model = model
        self._members = [member for member in members if isinstance(member, nn.Module)]
        self._taps = taps
        self._tell = tell
        self._asked = plan.asked
        self._sites = {port.site.name for port in plan.ports}
        self._survey()

    def _survey(self) -> None:
        modules = {id(module): module for member in self._members for module in member.modules()}.values()
        self._parents = [
            (module._modules, list(module._modules.values())) for module in modules if module._modules
        ]
        self._childless = [module._modules for module in modules if not module._modules]

    def look(self) -> None:
        """Call it before a step begins."""
        changed = any(self._childless)
        for position, (children, before) in enumerate(self._parents):
            now = list(children.values())
            if now != before:
                if _faces(now) != _faces(before):
                    changed = True
                self._parents[position] = children, now
        if changed:
            self._modules_changed()
        gone = self._taps.hooks_gone()
        if gone:
            self._put_on_again(gone)

    def _modules_changed(self) -> None:
        self._survey()
        try:
            now = {port.site.name for port in bind(tree_of(self._model), self._asked).ports}
        except TorchtapError:  # nothing that was asked for is left
            now = set()
        added, removed = sorted(now - self._sites), sorted(self._sites - now)
        replaced = self._taps.receiver_places_replaced()
        self._sites = now | self._sites
        if added:
            self._tell(
                f"the model has {len(added)} more sites that the taps ask for ({_some(added)}): they came after the "
                "watch was made and are not recorded; make a new watch to have them"
            )
        if removed or replaced:
            self._tell(
                f"modules that were under watch are gone or were replaced ({_some(removed or replaced)}): nothing "
                "comes from them any more; make a new watch to have what took their place"
            )

    def _put_on_again(self, gone: Sequence[nn.Module]) -> None:
        armed = self._taps.armed
        self._taps.arm(frozenset())
        self._taps.arm(armed)
        names = sorted({type(module).__name__ for module in gone})
        self._tell(
            f"other code has removed the hooks of torchtap from {len(gone)} modules ({_some(names)}): they are on "
            "again, what passed in between is missing"
        )


def _faces(modules: Sequence[nn.Module | None]) -> list[int]:
    """Modules by their state: a wrapper of ours is a second face of the same module."""
    return [id(unwrap(module).__dict__) if module is not None else 0 for module in modules]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shown(name, 100) for name in names[:_NAMED]) + more
