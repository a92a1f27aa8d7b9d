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
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Self, final
from weakref import finalize

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap.errors import SessionError
from torchtap.hooks.hooks import WayName
from torchtap.plan.names import OF_CALLS
from torchtap.plan.plan import Plan
from torchtap.receive import training
from torchtap.receive.receiver import Receiver
from torchtap.receive.training import StepListener
from torchtap.session.census import Evaluations, Lookout, ModelChanges
from torchtap.session.consumers import Consumers
from torchtap.session.steps import NO_CLOCK, AttachedPlan, StepRecorder, Summed
from torchtap.store.record import Consumer, StepRecord
from torchtap.store.write.pool import HostPool

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing
    from torchtap.session.coverage import Missing

__all__ = ["Watch"]


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
        self._consumers = outlets = Consumers(consumers, strict=strict, placing=placing)
        copy = HostPool().copy

        def tap(clock: StepRecorder, plan: Plan) -> AttachedPlan:
            receiver = Receiver(
                plan, strict=strict, copy=copy, on_lost=outlets.note_loss, clock=clock, placing=placing
            )
            return AttachedPlan(model, receiver, way)

        members = [model] if models is None else list(models.values())
        changes = ModelChanges(model, members, plan, outlets.note_loss, follow=follow_model)
        self._steps = StepRecorder(tap, plan, outlets, changes, first=recorded.stop)
        self._lookout = Lookout(members, self._steps, self._mode_changed, several=models is not None)
        self._evaluations = Evaluations(plan)
        self._follower: _Follower | None = None  # until an optimizer is followed
        self._recorded = recorded  # steps that earlier attempts left in the folder
        self._in_block = self._closed = False
        self._logs = False  # numbers were logged, so passes are noticed at every step
        self._joined = False  # this watch begins inside of an update
        self._begin(None)

    @property
    def plan(self) -> Plan:
        """The taps and the places that they are bound to; with ``follow_model``, those of the model as it is now."""
        return self._steps.taps.plan

    # -- the clock ----------------------------------------------------------------------------------------

    @contextmanager
    def step(
        self, step: int | None = None, *, epoch: int | None = None, batch: int | None = None
    ) -> Iterator[Self]:
        """Mark a block as one training step, with its forward, backward and update inside."""
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
        self._evaluations.begins(name, bool(steps.active.at(last, name)))
        try:
            yield self
        finally:
            steps.named = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record model calls inside this block."""
        with self._steps.taps.receiver.not_listening(), self._lookout.paused():
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
            self._joined = training.is_updating()
            self._follower = _Follower(self._steps, self._entered, self._updated)
            if not tracker.marked:
                self._steps.taps.receiver.begin_step(threading.get_ident())
        for each in found:
            self._follower.add(each)
        self._steps.arm()
        self._look_out()
        return self

    def _entered(self, optimizer: Optimizer) -> None:
        """A followed optimizer is about to update."""
        steps = self._steps
        if steps.taps.armed and "param" in self.plan.kinds:
            steps.audit.update(optimizer, self.plan)
        steps.tracker.enter()
        steps.act()

    def _updated(self, optimizer: int, skipped: bool) -> None:
        """A followed optimizer has updated its parameters, or a gradient scaler left that out."""
        steps, tracker = self._steps, self._steps.tracker
        tracker.note_update(optimizer, skipped=skipped)
        if not tracker.marked:
            steps.read_rest()
        steps.audit.updates += 1
        if not tracker.marked:
            if not self._joined:
                self._hint_silence(tracker.number)
            self._joined = False
            tracker.end_update()
            steps.act()
            self._begin(threading.get_ident())

    def _begin(self, thread: int | None) -> None:
        self._steps.begin_step(thread)
        self._look_out()

    def _look_out(self) -> None:
        """Notice the passes and the mode switches that decide where values belong."""
        steps, tracker, last = self._steps, self._steps.tracker, self._steps.tracker.last
        # An evaluation after a recorded step belongs to it, unless the next step has begun.
        awaits = (
            last is not None and tracker.follows and not steps.active.at(last, "eval") <= steps.taps.armed
        )
        if awaits:
            self._lookout.look_for_modes()
            if not self._lookout.is_training():
                steps.arm(evaluation=True)
        self._lookout.look(bool(steps.taps.armed) or awaits or (self._logs and tracker.follows))

    def _mode_changed(self, is_training: bool) -> None:
        steps = self._steps
        if self._closed:
            return
        steps.tracker.enter()  # a backward may have begun the next step
        steps.act()
        if steps.tracker.is_fresh:
            steps.arm(evaluation=not is_training)
            self._look_out()
            last = steps.tracker.last
            if not is_training and steps.named is None and last is not None:
                self._evaluations.begins("eval", bool(steps.active.at(last, "eval")))

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
        tracker.begin(step)
        steps.audit.mark = tracker.number
        steps.act()
        self._begin(threading.get_ident())

    def _end(self) -> None:
        steps, tracker = self._steps, self._steps.tracker
        if not tracker.marked:
            return
        steps.read_rest()
        if tracker.last is not None:  # marks may begin before the training does
            self._hint_silence(tracker.number)
        evaluated = tracker.only_evaluations() if tracker.learnt else []
        if evaluated:
            self._consumers.hint(
                "evaluation",
                f"step {tracker.number} holds passes of {', '.join(evaluated)} only, and took a number among the "
                "steps of the training. Have evaluations outside of steps: they belong to the step that ended last",
            )
        tracker.end()
        steps.audit.mark = None
        steps.act()

    def _hint_silence(self, step: int) -> None:
        """Warn if a step had active taps and no pass."""
        taps = self._steps.taps
        if not taps.armed or taps.receiver.totals.passes or not self._lookout.is_callable:
            return
        ports = (port for port in taps.plan.ports if not taps.armed.isdisjoint(port.taps))
        if any(port.site.kind in OF_CALLS for port in ports):
            self._consumers.hint(
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
            self._consumers.hint(
                "hidden",
                f"the folder holds steps up to {recorded[-1]} of an earlier attempt; this one begins at step "
                f"{first} and hides what it records again. To keep both, use another folder; to go on after "
                "them, leave start= out",
            )
        else:
            self._consumers.tell("continued", after=recorded[-1])

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
        self._consumers.tell(kind, **facts)

    def alert(
        self, level: str, title: str, text: str, step: int | None = None, site: str | None = None
    ) -> None:
        """Send an alert to the sinks that take them; ``level`` is info, warning or error."""
        self._consumers.alert(level, title, text, step, site)

    @property
    def live(self) -> bool:
        """Return True if any tap is active in the open step."""
        return bool(self._steps.taps.armed)

    @property
    def lost(self) -> list[str]:
        """What could not be kept, a sentence each: by the watch, by the run's writer, by the sinks."""
        return self._consumers.lost

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
        return self._steps.taps.receiver.totals.passes

    def structure(self, path: str) -> object:
        """Return the structure of a module's output if it is not one tensor: names of leaves stand for tensors."""
        port = self._steps.taps.receiver.ports.get((path, "output", ""))
        return None if port is None else port.structure

    def described_sites(self) -> list[dict[str, Any]]:
        """Return what was found out about the sites since the plan was made, in the order of execution."""
        return self._consumers.described(self._steps.taps.receiver.sites)

    def coverage(self) -> list[Missing]:
        """Return each site that the plan expects and that did not arrive so far, with the reason."""
        from torchtap.session.coverage import missing_sites

        return missing_sites(self._steps.taps.receiver, self._steps.active.ever)

    def summary(self, file: IO[str] | None = None) -> None:
        """Print the newest statistics of each site as a table."""
        from torchtap.session.summary import print_summary

        self._steps.settle()
        print_summary(self._consumers.newest.values(), self.coverage(), self.lost, file)

    def latest(self, site: str, statistic: str = "value", phase: str | None = None) -> float:
        """Return the newest number of a site, of any phase if none is named."""
        self._steps.settle()
        return self._consumers.latest(site, statistic, phase)

    def so_far(self) -> StepRecord | None:
        """Return the statistics of the newest pass as they are now; None if there are none yet.

        For decisions before the step is over. The step goes on and is recorded as a whole.
        """
        return self._steps.so_far()

    def flush(self) -> None:
        """Write everything so far to disk, visible to readers."""
        self._steps.settle()
        self._consumers.flush()

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the open step, write coverage and audit, remove every hook, close the run and the sinks."""
        if self._closed:
            return
        steps = self._steps
        try:
            clockless = steps.tracker.clockless
            steps.close()
            self._report(clockless)
        finally:
            self._closed = True
            steps.taps.receiver.end_step()
            if self._follower is not None:
                self._follower.stop()
            self._lookout.stop()
            steps.taps.attachment.detach()
            if self._consumers.keep_events:
                self._consumers.tell("sites", sites=self.described_sites())
                missing = [{"site": each.site, "reason": each.reason} for each in self.coverage()]
                self._consumers.tell("coverage", missing=missing)
                audit = steps.audit.result()
                for each in audit["failed"]:
                    self._consumers.tell("lost", message=f"audit: {each}")
                self._consumers.tell("audit", **audit)
            self._consumers.close()

    def _report(self, clockless: bool) -> None:
        """Warn of what is odd about the whole recording."""
        hint, late = self._consumers.hint, self._steps.taps.receiver.totals.late
        if clockless and self.passes > 1:
            hint("clock", NO_CLOCK)
        if not self._steps.audit.records:
            hint("empty", "this watch recorded nothing; watch.coverage() gives the reason for each site")
        if told := self._evaluations.told():
            hint("evaluations", told)
        if late:
            hint(
                "late",
                f"{late} gradient(s) came after their step was over and are in no record: have the backward pass in "
                "the step of its forward pass",
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
        steps: StepRecorder,
        entered: Callable[[Optimizer], None],
        updated: Callable[[int, bool], None],
    ) -> None:
        self._steps, self._entered, self._updated = steps, entered, updated
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
        self._steps.tracker.know(key, held)

    def _forget(self, key: int) -> None:
        if self._counts.pop(key, None) is not None:
            self._steps.tracker.forget(key)

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
        if not self._steps.taps.receiver.hears_this_thread():
            return False
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._counts.get(id(optimizer)) == count:
            return True
        known = id(optimizer) in self._counts
        if known or any(id(each) in self._parameters for each in training.parameters_of(optimizer)):
            self.add(optimizer)  # it has other parameters now, or shares those of one that is followed
            return True
        return False
