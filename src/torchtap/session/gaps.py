"""Notice what would stay silent: modules and parameters that come, go or are replaced under a watch, hooks that others
took off, and calls by threads that are not heard.

One look at the start of a step: children and parameters are compared by identity, a hook by its number in torch's own
table. Only when something differs, the plan is bound again to see which sites it concerns. With ``retap``, the taps
then move to the model as it is now; without, what is missing is told, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeVar, final

from torch import nn

from torchtap.errors import PlanError
from torchtap.forms.attach import tree_of
from torchtap.plan.plan import Plan, make_plan
from torchtap.plan.sites import unwrap
from torchtap.sanitize import shown
from torchtap.session.tapping import Tapping

__all__ = ["Gaps"]

_NAMED = 3
_OF_STATE = ("param", "buffer", "update", "optim_state")  # what these kinds begin with
_values_of = methodcaller("values")


@final
class Gaps:
    """Looks after the modules of a model and the hooks on them, and tells each change once."""

    def __init__(
        self,
        model: object,
        members: Iterable[object],
        taps: Tapping,
        tell: Callable[[str], None],
        retap: Callable[[Plan], Tapping] | None = None,
    ) -> None:
        self._model = model
        self._members = [member for member in members if isinstance(member, nn.Module)]
        self._taps = taps
        self._tell = tell
        self._retap = retap
        self._overheard = 0
        self._sites = {port.site.name for port in taps.plan.ports}
        self._state_asked = any(port.site.kind.startswith(_OF_STATE) for port in taps.plan.ports)
        self._survey()

    def _survey(self) -> None:
        modules = {id(module): module for member in self._members for module in member.modules()}.values()
        children = [module._modules for module in modules]
        self._parents, self._childless = _parted(children)
        self._children = _values(self._parents)
        held = list(modules) if self._state_asked else []
        self._tables, empty = _parted([each._parameters for each in held])
        self._parameters = _values(self._tables)
        self._buffers, emptied = _parted([each._buffers for each in held])
        self._buffer_counts = list(map(len, self._buffers))
        self._empty = [*empty, *emptied]

    def look(self) -> None:
        """Call it before a step begins."""
        if self._tree_changed():
            self._modules_changed()
        elif self._state_asked and self._taps.armed and self._state_changed():
            self._put_on_again()  # an optimizer's parameters are known by their identity
            self._modules_changed()
        gone = self._taps.hooks_gone()
        if gone:
            self._put_on_again()
            names = sorted({type(module).__name__ for module in gone})
            self._tell(
                f"other code has removed the hooks of torchtap from {len(gone)} modules ({_some(names)}): they are on "
                "again, what passed in between is missing"
            )
        overheard = self._taps.receiver.overheard
        if overheard and not self._overheard:
            self._tell(
                "other threads have called the model while a step was open: what passed there is in no record. A watch "
                "hears the thread that moves its clock"
            )
        self._overheard = overheard

    # Both are asked at every step, so all modules are gone through at once, by functions that are no Python.

    def _tree_changed(self) -> bool:
        changed = any(self._childless)
        now = _values(self._parents)
        if now != self._children:
            changed |= _faces(now) != _faces(self._children)
            self._children = now
        return changed

    def _state_changed(self) -> bool:
        """Whether parameters are others, or there are more or fewer. Where no tap is live, nobody need know yet.

        Buffers are read by their names, and some models make new ones at each pass.
        """
        now = _values(self._tables)
        # By identity: tensors that are compared are computed with.
        if len(now) != len(self._parameters) or not all(map(is_, now, self._parameters)):
            return True
        return any(self._empty) or list(map(len, self._buffers)) != self._buffer_counts

    def _modules_changed(self) -> None:
        replaced = self._taps.places_replaced()
        self._survey()
        try:
            plan = make_plan(tree_of(self._model), self._taps.plan.asked, all_match=False)
        except PlanError as error:  # an alias that stands for several places now
            self._tell(f"the model has changed and the taps do not fit it any more: {error}")
            return
        now = {port.site.name for port in plan.ports}
        added, removed = sorted(now - self._sites), sorted(self._sites - now)
        gone = removed or replaced
        if self._retap is not None and (added or gone):
            self._sites = now
            self._taps = self._retap(plan)
            return
        self._sites |= now
        if added:
            self._tell(
                f"the model has {len(added)} more sites that the taps ask for ({_some(added)}): they came after the "
                "watch was made and are not recorded; watch(follow_model=True) takes them in, or make a new watch"
            )
        if gone:
            self._tell(
                f"modules that were under watch are gone or were replaced ({_some(gone)}): nothing "
                "comes from them any more; watch(follow_model=True) goes over to what took their place, or make a new "
                "watch"
            )

    def _put_on_again(self) -> None:
        armed = self._taps.armed
        self._taps.arm(frozenset())
        self._taps.arm(armed)


_Table = TypeVar("_Table", bound=Mapping[str, Any])


def _parted(tables: Sequence[_Table]) -> tuple[list[_Table], list[_Table]]:
    """The tables that hold something, and the empty ones."""
    return [table for table in tables if table], [table for table in tables if not table]


def _values(tables: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All that is in some tables, one after the other."""
    return list(chain.from_iterable(map(_values_of, tables)))


def _faces(modules: Sequence[nn.Module | None]) -> list[int]:
    """Modules by their state: a wrapper shares the ``__dict__`` of the module inside it."""
    return [id(unwrap(module).__dict__) if module is not None else 0 for module in modules]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shown(name, 100) for name in names[:_NAMED]) + more
