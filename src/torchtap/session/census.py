"""The living model: what is called, in which mode, and what of it changes while it is recorded.

`ModelChanges` compares modules and parameters with those of the step before, by identity. If anything differs, the plan
is bound again. With ``follow``, the taps then move to the model as it is now; without, what is missing is reported. A
module that moved to another path always moves its taps: a site's name is that of the place.

`Lookout` registers hooks on what is called, so that a backward through a pass is noticed, also at steps without taps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_, methodcaller
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from torchtap.errors import PlanError
from torchtap.forms.attach import tree_of
from torchtap.forms.op.passes import PassHooks
from torchtap.plan.plan import Plan, make_plan
from torchtap.plan.sites import places, unwrap
from torchtap.plan.tap import Tap
from torchtap.sanitize import shown
from torchtap.session.coverage import replaced_paths

if TYPE_CHECKING:
    from torchtap.hooks.replace import ModeHook
    from torchtap.receive.placing import Placing
    from torchtap.session.steps import AttachedPlan, StepRecorder

__all__ = ["Evaluations", "Lookout", "ModelChanges"]

_OF_EVALUATIONS = {"input", "output", "attention", "value"}
_NAMED = 3
_OF_STATE = ("param", "buffer", "update", "optim_state")  # what these kinds begin with
_values_of = methodcaller("values")


@final
class ModelChanges:
    """Compare the modules of a model and the hooks on them with those before; report each change once.

    `look` and `look_at_modules` return the plan that the taps have to go over to, if there is one.
    """

    def __init__(
        self,
        model: object,
        members: Iterable[object],
        plan: Plan,
        tell: Callable[[str], None],
        *,
        follow: bool = False,
    ) -> None:
        self._model = model
        self._members = [member for member in members if isinstance(member, nn.Module)]
        self._tell, self._follow = tell, follow
        self._overheard = False  # calls in other threads have been reported
        self._sites = {port.site.name for port in plan.ports}
        self._state_asked = any(port.site.kind.startswith(_OF_STATE) for port in plan.ports)
        self._survey()

    def _survey(self) -> None:
        modules = {id(module): module for member in self._members for module in member.modules()}.values()
        self._tables = [module._modules for module in modules]
        self._children = _values(self._tables)
        held = list(modules) if self._state_asked else []
        self._parameter_tables = [module._parameters for module in held]
        self._parameters = _values(self._parameter_tables)
        self._buffers = [module._buffers for module in held]
        self._buffer_counts = list(map(len, self._buffers))

    def look(self, taps: AttachedPlan) -> Plan | None:
        """Compare everything, before a step begins."""
        plan = self.look_at_modules(taps)
        if plan is None and self._state_asked and taps.armed and self._state_changed():
            _put_on_again(taps)  # an optimizer's parameters are known by their identity
            plan = self._plan_now(taps)
        if plan is not None:
            return plan
        hooks_gone = getattr(taps.attachment, "hooks_gone", None)
        gone = () if hooks_gone is None else hooks_gone()
        if gone:
            _put_on_again(taps)
            names = sorted({type(module).__name__ for module in gone})
            self._tell(
                f"other code has removed the hooks of torchtap from {len(gone)} modules ({_some(names)}): they are "
                "registered again, what passed in between is missing"
            )
        if taps.receiver.totals.other_thread_calls and not self._overheard:
            self._overheard = True
            self._tell(
                "other threads have called the model while a step was open: what passed there is in no record. A watch "
                "records the thread that moves its clock"
            )
        return None

    # The comparisons run at every step, so all modules are gone through at once, by functions that are no Python.

    def look_at_modules(self, taps: AttachedPlan) -> Plan | None:
        """Compare the modules alone, when a pass begins."""
        now = list(chain.from_iterable(map(_values_of, self._tables)))
        if now == self._children:
            return None
        before, self._children = self._children, now
        return self._plan_now(taps) if _faces(now) != _faces(before) else None

    def _state_changed(self) -> bool:
        """Return True if parameters are others, or there are more or fewer.

        Buffers are read by their names, and some models make new ones at each pass.
        """
        now = _values(self._parameter_tables)
        # By identity: tensors that are compared are computed with.
        if len(now) != len(self._parameters) or not all(map(is_, now, self._parameters)):
            return True
        return list(map(len, self._buffers)) != self._buffer_counts

    def _plan_now(self, taps: AttachedPlan) -> Plan | None:
        """Return the plan for the model as it is now if the taps have to move; else report what is missing."""
        replaced = sorted(replaced_paths(taps.receiver))
        self._survey()
        try:
            plan = make_plan(tree_of(self._model), taps.plan.asked, all_match=False)
        except PlanError as error:  # an alias that stands for several places now
            self._tell(f"the model has changed and the taps do not fit it any more: {error}")
            return None
        now = {port.site.name for port in plan.ports}
        added, removed = sorted(now - self._sites), sorted(self._sites - now)
        gone = removed or replaced
        if (self._follow and (added or gone)) or self._moved(taps.plan):
            self._sites = now
            return plan
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
        return None

    def _moved(self, plan: Plan) -> bool:
        """Return True if a tapped module is at another path now, such as inside a wrapper that took its place."""
        now = {id(unwrap(place.module)): place.path for place in places(tree_of(self._model))}
        return any(now.get(id(unwrap(each.module)), each.path) != each.path for each in plan.places)


@final
class Lookout:
    """Notice passes, backward calls through them, and mode switches of the models that are called.

    several: the models are held together by a tree that is never called, so each call of one is a pass.
    """

    def __init__(
        self,
        models: Sequence[object],
        steps: StepRecorder,
        on_mode: Callable[[bool], None],
        *,
        several: bool,
    ) -> None:
        self._models, self._steps, self._several = models, steps, several
        self._modules = [model for model in models if isinstance(model, nn.Module)]
        # A script takes no hooks.
        hooked = [each for each in self._modules if not isinstance(each, torch.jit.ScriptModule)]
        self._passes = [PassHooks(model, self, on_output=self._output) for model in hooked]
        self._on_mode = on_mode
        self._modes: list[ModeHook] = []
        self._looks = self._paused = self._returned = False
        self._behind: tuple[AttachedPlan, int] | None = None  # whose hooks those of several models come after

    @property
    def placing(self) -> Placing | None:
        """What notes the placement of inputs, if no attachment does."""
        return self._steps.taps.receiver.placing if self._several else None

    @property
    def is_callable(self) -> bool:
        """Return True if any model has a forward: loose parameters are held by a module without one."""
        return any(type(model) is not nn.Module for model in self._models)

    def is_training(self) -> bool:
        """Return True if any model is in training mode."""
        return any(getattr(model, "training", True) for model in self._models)

    def look(self, wanted: bool) -> None:
        """Register or remove the hooks: they are needed for values, and to place logged numbers and evaluations."""
        taps = self._steps.taps
        if self._several and wanted and self._behind != (taps, taps.armings):
            # A pass ends after the values of the model itself: these hooks come after those of the taps.
            self._behind = taps, taps.armings
            self._looks = False
            for hooks in self._passes:
                hooks.switch_off()
        if wanted != self._looks:
            self._looks = wanted
            for hooks in self._passes:
                hooks.switch_on() if wanted else hooks.suspend()

    def look_for_modes(self) -> None:
        """Notice from now on when a model is switched to evaluation and back."""
        if not self._modes:
            from torchtap.hooks.replace import ModeHook

            self._modes = [ModeHook(module, self._on_mode) for module in self._modules]
            for hook in self._modes:
                hook.put_on()

    def stop(self) -> None:
        """Remove everything from the models."""
        for hooks in self._passes:
            hooks.switch_off()
        while self._modes:
            self._modes.pop().take_off()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notice nothing inside this block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def begin_pass(self, training: bool | None = None) -> None:
        """A model was called. If taps are active on it, the receiver has begun the pass."""
        taps = self._steps.taps
        self._returned = False
        if taps.armed:
            if self._several:
                taps.receiver.begin_pass(training)
        elif not self._paused and taps.receiver.hears_this_thread():
            self._steps.begin_pass(training is not False, torch.is_grad_enabled())

    def end_pass(self) -> None:
        """The call is over. One that raised has no output that a backward could run through."""
        if not self._returned:
            self._output(None)
        if self._several and self._steps.taps.armed:
            self._steps.taps.receiver.end_pass()

    def _output(self, output: object) -> None:
        self._returned = True
        if not self._paused and self._steps.taps.receiver.hears_this_thread():
            self._steps.output(output)


@final
class Evaluations:
    """Count evaluations that no tap was active for, to report them if none was recorded at all."""

    def __init__(self, plan: Plan) -> None:
        self._meant = any(map(_means_evaluations, plan.asked))
        self._missed: dict[str, int] = {}  # by phase
        self._any_live = False

    def begins(self, phase: str, live: bool) -> None:
        """The model is about to be evaluated; ``live``: taps are active for that."""
        if live:
            self._any_live = True
        elif phase != "train":
            self._missed[phase] = self._missed.get(phase, 0) + 1

    def told(self) -> str:
        """Return what to report at the end; nothing for a single evaluation, such as a test after the training."""
        count = sum(self._missed.values())
        if self._any_live or not self._meant or count < 2:
            return ""
        names = " and ".join(map(repr, self._missed))
        return (
            f"the model was evaluated {count} times (phase {names}), and no tap was live at any of them. An "
            "evaluation belongs to the step that ended last, and every= and steps= count those steps; phase= is "
            f"compared by name. Give evaluations a tap of their own: tt.tap(..., phase={next(iter(self._missed))!r})"
        )


def _means_evaluations(tap: Tap) -> bool:
    """Return True if a tap takes what an evaluation brings, and no phase or function of the user rules it out."""
    said = json.dumps(tap.schedule.spec())
    by_choice = '"phase": "train"' in said or '"when"' in said
    return not by_choice and any(_OF_EVALUATIONS & selector.kinds for selector in tap.selectors)


def _put_on_again(taps: AttachedPlan) -> None:
    armed = taps.armed
    taps.arm(frozenset())
    taps.arm(armed)


def _values(tables: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return all that is in some tables, one after the other."""
    return list(chain.from_iterable(map(_values_of, tables)))


def _faces(modules: Sequence[nn.Module | None]) -> list[int]:
    """Return modules by their state: a wrapper shares the ``__dict__`` of the module inside it."""
    return [id(unwrap(module).__dict__) if module is not None else 0 for module in modules]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shown(name, 100) for name in names[:_NAMED]) + more
