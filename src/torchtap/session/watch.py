"""Record a model while it trains: the public object behind `torchtap.watch`.

It guarantees:
- marks of the user (`step`, `set_step`, `set_batch`) or followed optimizers decide when a step ends; passes of one step
  fold into one record for each phase (`tracker`);
- at a step that no tap selects, the model carries no tap;
- a sink or a reduction that fails costs its own values, never the training (unless ``strict``);
- a tap that is over its budget keeps less;
- `close` leaves the model as it was found, and writes the audit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Any, Self, final
from weakref import finalize

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap.errors import SessionError
from torchtap.hooks.hooks import WayName
from torchtap.plan.plan import Plan
from torchtap.receive import training
from torchtap.receive.receiver import Receiver
from torchtap.receive.training import StepListener
from torchtap.schedule.base import Moment
from torchtap.session.attached import AttachedPlan
from torchtap.session.audit import Audit
from torchtap.session.census import Evaluations, Lookout, ModelChanges
from torchtap.session.consumers import Consumers, Latest, SiteTable
from torchtap.session.steps import StepRecorder, Summed
from torchtap.session.tracker import StepTracker, Update
from torchtap.store.record import Consumer, StepRecord
from torchtap.store.write.pool import HostPool

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing
    from torchtap.session.coverage import Missing

__all__ = ["Watch"]

_NO_CLOCK = (
    "nothing moves the clock: all passes fold into one record, which is written when the watch is closed. Use "
    "watch.follow(optimizer), or `with watch.step():`"
)


@final
class Watch:
    """Made by `torchtap.watch`. A context manager; also closed by `close`."""

    def __init__(
        self,
        model: object,
        plan: Plan,
        consumers: Sequence[Consumer],
        *,
        models: Mapping[str, object] | None = None,
        strict: bool = False,
        way: WayName = "hook",
        recorded: range = range(0),
        placing: Placing | None = None,
        follow_model: bool = False,
    ) -> None:
        self._outlets = outlets = Consumers(consumers, strict=strict)
        self._sites = SiteTable(outlets, placing)
        self._recorded = recorded  # steps that earlier attempts left in the folder
        self._audit = Audit()

        def tap(steps: StepRecorder, plan: Plan = plan) -> AttachedPlan:
            return AttachedPlan(
                model,
                plan,
                models=models,
                strict=strict,
                copy=HostPool().copy,
                on_lost=outlets.note_loss,
                way=way,
                clock=steps,
                placing=placing,
            )

        members = [model] if models is None else list(models.values())
        self._steps = StepRecorder(
            tap, outlets, self._hand_on, self._left, self._audit, self._model_changed, first=recorded.stop
        )
        self._follower: _Follower | None = None  # until an optimizer is followed
        self._lookout = Lookout(members, self._steps, self._mode_changed, self._passed)
        self._evaluations = Evaluations(plan)
        self._newest = Latest()
        self._in_block = self._closed = self._logs = self._joined = False

        def go_over_to(plan: Plan) -> AttachedPlan:
            """Register the taps on the modules that the model consists of now."""
            before, entries = self.plan, self._receiver.sites
            taps = self._steps.change_taps(lambda steps: tap(steps, plan))
            self._sites.model_changed(before, entries, plan)
            self._audit.model_changed()
            return taps

        self._changes = ModelChanges(
            model, members, self._steps.taps, outlets.note_loss, go_over_to, follow=follow_model
        )
        self._steps.begin_step(None)
        self._lookout.look(bool(self._steps.taps.armed))

    @property
    def plan(self) -> Plan:
        """The taps and the places that they are bound to; with ``follow_model``, those of the model as it is now."""
        return self._steps.taps.plan

    @property
    def _receiver(self) -> Receiver:
        return self._steps.taps.receiver

    # -- the clock ----------------------------------------------------------------------------------------

    def step(
        self, step: int | None = None, *, epoch: int | None = None, batch: int | None = None
    ) -> AbstractContextManager[Self]:
        """Mark a block as one training step, with its forward, backward and update inside."""
        return self._block(step, epoch, batch)

    @contextmanager
    def _block(self, step: int | None, epoch: int | None, batch: int | None) -> Iterator[Self]:
        if self._in_block:
            raise SessionError("watch.step() inside watch.step(): a step cannot hold another")
        self._advance(step, epoch, batch)
        self._in_block = True
        try:
            yield self
        finally:
            self._in_block = False
            self._end()

    def set_step(self, step: int) -> None:
        """End the step before and begin this one. The same number again changes nothing."""
        tracker = self._steps.tracker
        if (tracker.marked or tracker.follows) and step == tracker.number:
            self._check_open()
            return
        if tracker.follows and not tracker.marked:
            self._check_open()
            tracker.set_number(step)
            self._steps.act()
            self._begin(threading.get_ident())
        else:
            self._advance(step, None, None)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, and end the step before; the next step begins with `set_batch` or `step`.

        If an optimizer is followed, its next update ends the first step of this epoch.
        """
        self._check_open()
        if self._follower is None:
            self._end()
        self._steps.tracker.set_epoch(epoch)

    def set_batch(self, batch: int) -> None:
        """End the step before and begin one with this batch. If an optimizer is followed, only note the batch."""
        if self._follower is not None:
            self._check_open()
            self._steps.tracker.set_batch(batch)
        else:
            self._advance(None, None, batch)

    def end_step(self) -> None:
        """End the open step and hand it on. What is evaluated until the next step still belongs to it."""
        self._end()
        self._steps.tracker.leave()
        self._steps.settle()

    @contextmanager
    def phase(self, name: str) -> Iterator[Self]:
        """Name the phase of the passes inside this block, whatever the model's mode."""
        if not isinstance(name, str) or not name:
            raise SessionError(f"phase({name!r}): give the phase a name, e.g. 'valid'")
        self._check_open()
        steps = self._steps
        before, steps.named = steps.named, name
        steps.arm(evaluation=True)
        self._look_out()
        last = steps.tracker.last or steps.tracker.moment()
        self._evaluations.begins(name, bool(steps.live_at(last, name)))
        try:
            yield self
        finally:
            steps.named = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record model calls inside this block."""
        with self._receiver.not_listening(), self._lookout.paused():
            yield

    def follow(self, *optimizers: object, start: int | None = None) -> Self:
        """Let the updates of optimizers end the steps.

        A step is one update, or the updates of several optimizers that take turns. An update that a gradient scaler
        leaves out counts, too. Optimizers that frameworks have wrapped are found inside.

        Args:
            optimizers: torch optimizers, or what a framework made of them. Further ones may be followed later.
            start: the number of the first step. Without it, a folder that holds steps is continued after them.

        Returns the watch. Raises `SessionError` for anything that holds no optimizer.
        """
        self._check_open()
        tracker = self._steps.tracker
        if start is not None and (tracker.follows or tracker.marked or tracker.last is not None):
            raise SessionError(
                f"follow(start={start}): step {tracker.number} has begun already; give start= with the first follow"
            )
        found = _inside(optimizers)
        if start is not None:
            tracker.set_start(start)
        if tracker.last is None:
            self._tell_what_is_hidden(None)
        if self._follower is None:
            self._joined = training.is_updating()  # this watch begins inside of an update
            self._follower = _Follower(tracker, self._hears, self._entered, self._updated)
            if not tracker.marked:
                self._receiver.begin_step(threading.get_ident())
        for each in found:
            self._follower.add(each)
        self._steps.arm()
        self._look_out()
        return self

    def _hears(self) -> bool:
        return self._receiver.hears_this_thread()

    def _entered(self, optimizer: Optimizer) -> None:
        """A followed optimizer is about to update."""
        if self._steps.taps.armed and "param" in self.plan.kinds:
            self._audit.update(*self._changes.smallest(optimizer))
        self._steps.tracker.enter()
        self._steps.act()

    def _updated(self, optimizer: int, skipped: bool) -> None:
        steps = self._steps
        steps.tracker.note_update(optimizer, skipped=skipped)
        if steps.tracker.marked:
            self._audit.updates += 1
            return
        steps.read_rest()
        self._audit.updates += 1
        if not self._joined:
            self._hint_silence(steps.tracker.number)
        self._joined = False
        steps.tracker.end_update()
        steps.act()
        self._begin(threading.get_ident())

    def _begin(self, thread: int) -> None:
        self._look_for_changes(self._steps.tracker.number)
        self._steps.begin_step(thread)
        self._look_out()

    def _look_for_changes(self, step: int) -> None:
        """Compare the model with what it was, unless no tap is active."""
        if self._steps.taps.armed or self._steps.wanted_at(step):
            self._changes.look()

    def _model_changed(self) -> bool:
        """Return True if the taps have moved to other modules, before the first pass of a step."""
        return self._changes.look_at_modules()

    def _look_out(self) -> None:
        """Notice the passes and the mode switches that decide where values belong."""
        steps = self._steps
        tracker, last = steps.tracker, steps.tracker.last
        armed = steps.taps.armed
        # An evaluation after a recorded step belongs to it, unless the next step has begun.
        awaits = last is not None and tracker.follows and not steps.live_at(last, "eval") <= armed
        if awaits:
            self._lookout.look_for_modes()
            if not self._lookout.is_training():
                steps.arm(evaluation=True)
        self._lookout.look(bool(steps.taps.armed) or awaits or (self._logs and tracker.follows))

    def _passed(self) -> None:
        tracker = self._steps.tracker
        clockless = tracker.last is None and not tracker.marked and not tracker.follows
        if clockless and tracker.training_passes == 2:
            self._outlets.hint("clock", _NO_CLOCK)

    def _mode_changed(self, is_training: bool) -> None:
        steps = self._steps
        if self._closed:
            return
        steps.tracker.enter()  # a backward may have begun the next step
        steps.act()
        if steps.tracker.is_fresh:
            steps.arm(evaluation=not is_training)
            self._look_out()
            if not is_training and steps.named is None and steps.tracker.last is not None:
                self._evaluations.begins("eval", bool(steps.live_at(steps.tracker.last, "eval")))

    def _advance(self, step: int | None, epoch: int | None, batch: int | None) -> None:
        self._check_open()
        steps = self._steps
        tracker = steps.tracker
        self._end()
        if epoch is not None:
            tracker.set_epoch(epoch)
        if batch is not None:
            tracker.set_batch(batch)
        if self._recorded:
            self._tell_what_is_hidden(step)
        self._look_for_changes(tracker.number if step is None else step)
        tracker.begin(step)
        self._audit.mark(tracker.number if step is None else step)
        steps.act()
        steps.begin_step(threading.get_ident())
        self._look_out()

    def _end(self) -> None:
        steps = self._steps
        if steps.tracker.marked:
            steps.read_rest()
            if steps.tracker.last is not None:  # marks may begin before the training does
                self._hint_silence(steps.tracker.number)
            evaluated = steps.tracker.only_evaluations()
            if evaluated and steps.tracker.learnt:
                self._outlets.hint(
                    "evaluation",
                    f"step {steps.tracker.number} holds passes of {', '.join(evaluated)} only, and took a number "
                    "among the steps of the training. Have evaluations outside of steps: they belong to the step "
                    "that ended last",
                )
            steps.tracker.end()
            self._audit.mark(None)
            steps.act()

    def _hint_silence(self, step: int) -> None:
        taps = self._steps.taps
        if (
            taps.armed
            and not taps.receiver.totals.passes
            and taps.listens_to_passes
            and self._lookout.is_callable
        ):
            self._outlets.hint(
                "silent",
                f"step {step} is over and no call of the model was seen. If a compiled or wrapped model is called, "
                "give torchtap that one",
            )

    def _tell_what_is_hidden(self, step: int | None) -> None:
        """Warn before steps of earlier attempts are recorded again: those will not be shown any more."""
        if not self._recorded:
            return
        recorded, self._recorded = self._recorded, range(0)
        first = self._steps.tracker.number if step is None else step
        if isinstance(first, int) and first < recorded.stop:
            self._outlets.hint(
                "hidden",
                f"the folder holds steps up to {recorded[-1]} of an earlier attempt; this one begins at step "
                f"{first} and hides what it records again. To keep both, use another folder; to go on after "
                "them, leave start= out",
            )
        else:
            self._outlets.tell("continued", after=recorded[-1])

    # -- what comes out -----------------------------------------------------------------------------------

    def log(
        self,
        name: str | Mapping[str, float | Tensor] | None = None,
        value: float | Tensor | None = None,
        **numbers: float | Tensor,
    ) -> None:
        """Log numbers of the training's own: ``watch.log("loss", loss)``, ``watch.log(loss=loss)``, or a mapping.

        They belong to the step of the last training pass or update before the call. A tensor with more than one
        element is kept whole. A name with a colon is a full site name, any other becomes ``:value.<name>``.
        """
        self._check_open()
        self._steps.log(name, value, dict(numbers))
        if not self._logs:
            self._logs = True
            self._look_out()

    def add(self, numbers: Mapping[str, float | Tensor] | None = None, **more: float | Tensor) -> None:
        """Log numbers that add up over a step, such as the losses of its backward calls.

        They belong to the update that follows.
        """
        given = {**(numbers or {}), **more}
        self.log({name: Summed(value) for name, value in given.items()})  # type: ignore[misc]

    def note(self, kind: str, **facts: object) -> None:
        """Write an event beside the values; `Run.events` returns it."""
        self._outlets.tell(kind, **facts)

    def alert(
        self, level: str, title: str, text: str, step: int | None = None, site: str | None = None
    ) -> None:
        """Send an alert to the sinks that take them; ``level`` is info, warning or error."""
        self._outlets.alert(level, title, text, step, site)

    @property
    def live(self) -> bool:
        """Return True if any tap is active in the open step."""
        return bool(self._steps.taps.armed)

    @property
    def lost(self) -> list[str]:
        """What could not be kept, a sentence each: by the watch, by the run's writer, by the sinks."""
        return self._outlets.lost

    @property
    def step_number(self) -> int:
        """The step that is open, or the one that ended last; -1 before the first."""
        tracker = self._steps.tracker
        if tracker.marked or (tracker.follows and not self._closed):
            return tracker.number
        return -1 if tracker.last is None else tracker.last.step

    @property
    def updates(self) -> int:
        """How many updates of followed optimizers were seen, those that a scaler left out included."""
        return self._steps.tracker.updates

    @property
    def passes(self) -> int:
        """How many times the model was called while a step was open and a tap active."""
        return self._receiver.totals.passes

    def structure(self, path: str) -> object:
        """Return the structure of a module's output if it is not one tensor: names of leaves stand for tensors."""
        port = self._receiver.ports.get((path, "output", ""))
        return None if port is None else port.structure

    def _hand_on(self, record: StepRecord) -> None:
        self._audit.record(record)
        self._newest.add(record)
        self._sites.before(record, self._receiver.sites)
        self._outlets.write(record)

    def _left(self, moment: Moment, updates: tuple[Update, ...]) -> None:
        tracker = self._steps.tracker
        self._audit.left(moment, updates, [tracker.parameters_of(each.optimizer) for each in updates])
        for each in updates:
            if each.skipped:
                self._outlets.tell("skipped", step=moment.step)

    def described_sites(self) -> list[dict[str, Any]]:
        """Return what was found out about the sites since the plan was made, in the order of execution."""
        return self._sites.described(self._receiver.sites)

    def coverage(self) -> list[Missing]:
        """Return each site that the plan expects and that did not arrive so far, with the reason."""
        from torchtap.session.coverage import missing_sites

        return missing_sites(self._receiver, self._steps.ever_live)

    def summary(self, file: IO[str] | None = None) -> None:
        """Print the newest statistics of each site as a table."""
        from torchtap.session.summary import print_summary

        self._steps.settle()
        print_summary(self._newest.blocks(), self.coverage(), self.lost, file)

    def latest(self, site: str, statistic: str = "value", phase: str | None = None) -> float:
        """Return the newest number of a site, of any phase if none is named."""
        self._steps.settle()
        return self._newest.number(site, statistic, phase)

    def so_far(self) -> StepRecord | None:
        """Return the statistics of the newest pass as they are now; None if there are none yet.

        For decisions before the step is over. The step goes on and is recorded as a whole.
        """
        return self._steps.so_far()

    def flush(self) -> None:
        """Write everything so far to disk, visible to readers."""
        self._steps.settle()
        self._outlets.flush()

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the open step, write coverage and audit, remove every hook, close the run and the sinks."""
        if self._closed:
            return
        steps = self._steps
        try:
            clockless = not steps.tracker.follows and not steps.tracker.marked and steps.tracker.last is None
            steps.close()
            self._report(clockless)
        finally:
            self._closed = True
            self._receiver.end_step()
            if self._follower is not None:
                self._follower.stop()
            self._lookout.stop()
            steps.taps.detach()
            if self._outlets.keep_events:
                self._sites.tell(self._receiver.sites)
                missing = [{"site": each.site, "reason": each.reason} for each in self.coverage()]
                self._outlets.tell("coverage", missing=missing)
                self._tell_audit()
            self._outlets.close()

    def _tell_audit(self) -> None:
        """Write the audit into the run; what does not add up is a problem of the run."""
        result = self._audit.result()
        for each in result["failed"]:
            self._outlets.tell("lost", message=f"audit: {each}")
        self._outlets.tell("audit", **result)

    def _report(self, clockless: bool) -> None:
        """Warn of what is odd about the whole recording."""
        if clockless and self.passes > 1:
            self._outlets.hint("clock", _NO_CLOCK)
        if not self._newest and not self._audit.records:
            self._outlets.hint(
                "empty", "this watch recorded nothing; watch.coverage() gives the reason for each site"
            )
        if told := self._evaluations.told():
            self._outlets.hint("evaluations", told)
        if self._receiver.totals.late:
            self._outlets.hint(
                "late",
                f"{self._receiver.totals.late} gradient(s) came after their step was over and are in no record: "
                "have the backward pass in the step of its forward pass",
            )

    def __repr__(self) -> str:
        tracker = self._steps.tracker
        if self._closed:
            state = "closed"
        elif tracker.marked or (tracker.follows and not tracker.is_fresh):
            state = f"in step {tracker.number}"
        elif tracker.last is not None:
            state = f"after step {tracker.last.step}"
        else:
            state = "before the first step" + ("" if tracker.follows else ", no clock yet")
        lost = f", {len(self.lost)} lost" if self.lost else ""
        taps = f"{len(self.plan.asked)} taps on {len(self.plan.ports)} places"
        return f"Watch({taps}, {state}, {self.passes} passes{lost})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this watch is closed; make a new one to go on")


def _inside(optimizers: Sequence[object]) -> list[Optimizer]:
    """Return the torch optimizers inside whatever was given."""
    found: list[Optimizer] = []
    for each in optimizers:
        inside = training.innermost(each)
        if not inside:
            raise SessionError(
                f"follow({each!r}): give a torch.optim.Optimizer, or what a framework wraps around one; "
                "its updates end the steps"
            )
        found += inside
    if not found:
        raise SessionError("follow(): give at least one optimizer, whose updates end the steps")
    return found


@final
class _Follower(StepListener):
    """Pass the events of followed optimizers on. An optimizer over the same parameters counts as followed."""

    def __init__(
        self,
        tracker: StepTracker,
        is_ours: Callable[[], bool],
        entered: Callable[[Optimizer], None],
        updated: Callable[[int, bool], None],
    ) -> None:
        self._tracker = tracker
        self._is_ours = is_ours  # the thread that runs
        self._entered, self._updated = entered, updated
        self._counts: dict[int, int] = {}  # by optimizer: its parameters, when they were last looked at
        self._parameters: set[int] = set()
        training.listen(self, clock=True)

    def add(self, optimizer: Optimizer) -> None:
        """Follow this optimizer until it is gone."""
        key = id(optimizer)
        held = [id(parameter) for parameter in training.parameters_of(optimizer)]
        if key not in self._counts:
            finalize(optimizer, self._forget, key).atexit = False
        self._counts[key] = len(held)
        self._parameters.update(held)
        self._tracker.know(key, held)

    def _forget(self, key: int) -> None:
        if self._counts.pop(key, None) is not None:
            self._tracker.forget(key)

    def stop(self) -> None:
        """Follow no optimizer any more."""
        training.stop_listening(self)
        self._counts.clear()

    def entered(self, optimizer: Optimizer) -> None:
        if self._is_followed(optimizer):
            self._entered(optimizer)

    def updated(self, optimizer: Optimizer) -> None:
        if self._is_followed(optimizer):
            self._updated(id(optimizer), False)

    def skipped(self, optimizer: Optimizer) -> None:
        if self._is_followed(optimizer):
            self._updated(id(optimizer), True)

    def _is_followed(self, optimizer: Optimizer) -> bool:
        if not self._is_ours():
            return False
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._counts.get(id(optimizer)) == count:
            return True
        known = id(optimizer) in self._counts
        if known or any(id(each) in self._parameters for each in training.parameters_of(optimizer)):
            self.add(optimizer)  # it has other parameters now, or shares those of one that is followed
            return True
        return False
