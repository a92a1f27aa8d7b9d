"""A training under watch: each step's values become a record for each phase, for the run folder and the sinks.

It guarantees:
- what moves the clock (`step`, `set_step`, `set_batch`, `follow`) decides when a step ends; passes over the model
  within a step fold into one record for each phase, training apart from evaluation (`steps`);
- on a step that no tap asked for, the model carries no tap;
- a sink or a reduction that fails costs its own values, never the training (unless ``strict``);
- a tap that is over its budget keeps less;
- `close` leaves the model as it was found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Any, Self, final

from torch import Tensor

from torchtap.errors import SessionError
from torchtap.hooks.hooks import WayName
from torchtap.plan.plan import Plan
from torchtap.receive.receiver import Receiver
from torchtap.session.block import Block
from torchtap.session.evaluations import Evaluations
from torchtap.session.gaps import Gaps
from torchtap.session.newest import Newest
from torchtap.session.outlets import Outlets
from torchtap.session.steps import StepMaker
from torchtap.session.tapping import Tapping
from torchtap.session.told_sites import ToldSites
from torchtap.store.record import Consumer, StepRecord
from torchtap.store.write.pool import HostPool

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing
    from torchtap.session.coverage import Missing
    from torchtap.session.following import Following

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
        self._model = model
        self._outlets = outlets = Outlets(consumers, strict=strict)
        self._sites = ToldSites(outlets, placing)
        self._recorded = recorded  # steps that earlier attempts left in the folder

        def tap(steps: StepMaker, plan: Plan = plan) -> Tapping:
            return Tapping(
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

        self._maker = StepMaker(
            plan,
            tap,
            outlets,
            self._hand_on,
            is_training=self._is_training,
            on_no_clock=self._hint_no_clock,
            first=recorded.stop,
        )
        self._lull = self._maker.lull
        self._next_block = self._block_of(None, None, None)
        self._members = [model] if models is None else list(models.values())
        self._following: Following | None = None  # until an optimizer is followed
        self._logs = False  # whether the training logs numbers of its own
        self._newest = Newest()
        self._handed_on = 0
        self._skipped = False
        self._evaluations = Evaluations(plan)
        self._closed = False
        self._tap = tap
        retap = self._go_over_to if follow_model else None
        self._gaps = Gaps(model, self._members, self._steps.taps, outlets.note_loss, retap)
        self._steps.listen_before()

    @property
    def plan(self) -> Plan:
        """The taps and the places that they are bound to; with ``follow_model``, those of the model as it is now."""
        return self._maker.taps.plan

    @property
    def _steps(self) -> StepMaker:
        """The steps, all of them counted, for whoever makes something happen."""
        lull = self._lull
        if lull.open >= 0 or lull.last >= 0:
            self._maker.catch_up()
        return self._maker

    @property
    def _receiver(self) -> Receiver:
        return self._maker.taps.receiver

    def _go_over_to(self, plan: Plan) -> Tapping:
        """The model has changed: the taps are put on what it consists of now."""
        before, entries = self.plan, self._receiver.entries
        taps = self._steps.change_taps(lambda steps: self._tap(steps, plan))
        self._sites.model_changed(before, entries, plan)
        return taps

    def _is_training(self) -> bool:
        return any(getattr(model, "training", True) for model in self._members)

    # -- the clock ----------------------------------------------------------------------------------------

    def step(
        self, step: int | None = None, *, epoch: int | None = None, batch: int | None = None
    ) -> AbstractContextManager[Self]:
        """One training step: forward, backward and update are inside. Passes of one phase fold together."""
        if step is None and epoch is None and batch is None:
            return self._next_block
        return self._block_of(step, epoch, batch)

    def _block_of(self, step: int | None, epoch: int | None, batch: int | None) -> Block[Self]:
        return Block(self, self._lull, self._enter_block, self._leave_block, step, epoch, batch)

    def _enter_block(self, step: int | None, epoch: int | None, batch: int | None) -> None:
        if self._lull.in_block:
            raise SessionError("watch.step() inside watch.step(): a step cannot hold another")
        self._advance(step, epoch, batch)
        self._lull.in_block = True

    def _leave_block(self) -> None:
        self._lull.in_block = False
        self._end()

    def set_step(self, step: int) -> None:
        """The step before is over, this one begins. The same number again changes nothing."""
        if not self._following and (step == self._lull.open or self._lull.goes_on(step)):
            return
        if self._steps.open is None or step != self._steps.open.step:
            self._advance(step, None, None)

    def set_epoch(self, epoch: int) -> None:
        """The step before is over, and so is its epoch; the next step begins with `set_batch` or `step`.

        Where an optimizer is followed, its next update ends the first step of this epoch.
        """
        self._check_open()
        if not self._following:
            self._end()
        self._steps.clock.set_epoch(epoch)
        if self._following:
            self._steps.relabel()

    def set_batch(self, batch: int) -> None:
        """The step before is over; a step with this batch begins. Where an optimizer is followed, it is only noted."""
        if self._following:
            self._check_open()
            self._steps.clock.set_batch(batch)
            self._steps.relabel()
        else:
            self._advance(None, None, batch)

    def end_step(self) -> None:
        """The open step is over, and what came in it is handed on. What is evaluated until the next is still its."""
        self._end()
        self._steps.leave_last()
        self._steps.settle()

    @contextmanager
    def phase(self, name: str) -> Iterator[Self]:
        """A block whose passes are of a phase with this name, whatever the model's mode says."""
        if not isinstance(name, str) or not name:
            raise SessionError(f"phase({name!r}): give the phase a name, e.g. 'valid'")
        self._check_open()
        before, self._receiver.phase = self._receiver.phase, name
        self._steps.rearm()
        self._evaluations.begins(name, self._steps.live_after_last(name))
        try:
            yield self
        finally:
            self._receiver.phase = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which passes over the model are not taken: a look at it that is no part of the training."""
        with self._receiver.not_listening():
            yield

    def follow(self, *optimizers: object, start: int | None = None) -> Self:
        """Let optimizers be the clock: a step is over when each of them has updated, or a scaler left the update out.

        What frameworks wrap around optimizers is taken too. ``start`` is the number of the first step; without it
        a folder that holds steps already is continued after them. Returns the watch.
        """
        self._check_open()
        steps = self._steps
        fresh = steps.last is None and steps.open is None
        if start is not None and not fresh:
            raise SessionError(
                f"follow(start={start}): step {steps.clock.step} has begun already; give start= with the first follow"
            )
        self._followed().add(optimizers)
        if start is not None:
            steps.clock.start_at(start)
        if fresh and steps.passes_before and self._followed().sentry.sees_gradients():
            self._tell_what_is_hidden(None)
            steps.adopt_early(threading.get_ident())
        elif steps.open is None:
            self._tell_what_is_hidden(None)
            steps.begin(None, threading.get_ident(), fresh=True)
        self._look_out()
        return self

    def _followed(self) -> Following:
        """Who is followed, perhaps nobody yet. Loaded here: where steps are blocks, nobody ever is."""
        if self._following is None:
            from torchtap.session.following import Following, Sentry

            sentry = Sentry(self._members, self._steps.pass_begins, self._mode_changed)
            self._following = Following(
                self._update_is_done, lambda: self._receiver.hears_this_thread(), sentry
            )
        return self._following

    def _update_is_done(self, skipped: bool) -> None:
        """Every followed optimizer has stepped."""
        self._skipped |= skipped
        if self._lull.in_block or self._closed:
            return
        if not self._skipped and self._lull.goes_on():
            return
        steps = self._steps
        self._finish(steps)
        self._gaps.look()
        steps.begin(None, threading.get_ident(), fresh=True)
        self._look_out()
        if not self._logs:  # whose the next number will be, the next pass tells
            steps.rest()

    def _finish(self, steps: StepMaker) -> None:
        skipped, self._skipped = self._skipped, False
        if skipped and steps.open is not None:
            self._outlets.tell("skipped", step=steps.open.step)
        steps.end(skipped=skipped)

    def _look_out(self) -> None:
        """Nothing of ours may be on the model in this step; what comes must still find its place."""
        steps, following = self._steps, self._followed()
        following.sentry.look_for_passes(self._logs and not steps.taps.armed)
        if steps.last is not None and not steps.live_at(steps.last, "eval") <= steps.taps.armed:
            following.sentry.look_for_modes()
            if not self._is_training():
                steps.rearm()

    def _mode_changed(self, training: bool) -> None:
        if self._steps.fresh and not self._closed:
            self._steps.rearm(evaluation=not training)
            if not training and self._receiver.phase is None:
                self._evaluations.begins("eval", self._steps.live_after_last("eval"))

    def _hint_no_clock(self) -> None:
        self._outlets.hint(
            "clock",
            "nothing moves the clock: all passes fold into one record, which is written when the watch is closed. Use "
            "watch.follow(optimizer), or `with watch.step():`",
        )

    def _advance(self, step: int | None, epoch: int | None, batch: int | None) -> None:
        self._check_open()
        steps = self._steps
        if steps.open is not None:
            self._end()
        if epoch is not None:
            steps.clock.set_epoch(epoch)
        if batch is not None:
            steps.clock.set_batch(batch)
        if self._recorded:
            self._tell_what_is_hidden(step)
        wanted = steps.wanted_next(step)
        if wanted or steps.taps.armed:  # where no tap is live, nobody need know yet
            self._gaps.look()
        steps.begin(step, threading.get_ident(), wanted=wanted)
        if not wanted and not self._following:
            steps.rest()

    def _end(self) -> None:
        steps = self._steps
        if steps.open is not None:
            self._finish(steps)
            steps.release()

    def _tell_what_is_hidden(self, step: int | None) -> None:
        """Before a step is recorded a second time: what earlier attempts have of it will not be shown any more."""
        if self._recorded:
            from torchtap.session.resumed import tell_what_is_hidden

            recorded, self._recorded = self._recorded, range(0)
            first = self._steps.clock.following if step is None else step
            tell_what_is_hidden(self._outlets, recorded, first)

    # -- what comes out -----------------------------------------------------------------------------------

    def log(
        self,
        name: str | Mapping[str, float | Tensor] | None = None,
        value: float | Tensor | None = None,
        **numbers: float | Tensor,
    ) -> None:
        """Numbers of the training's own: ``watch.log("loss", loss)``, ``watch.log(loss=loss)``, or a mapping.

        After an update they belong to the step that it ended. A tensor is read when the step ends, together with
        everything else. One with more than one element is kept whole. A name with a colon is a full site name, any
        other becomes ``:value.<name>``.
        """
        self._check_open()
        phase = self._receiver.phase or "train"
        self._steps.logged.add(phase, name, value, numbers)
        if not self._logs and self._following:
            self._logs = True
            self._look_out()
        self._logs = True

    def note(self, kind: str, **facts: object) -> None:
        """Write something down beside the values; `Run.events` gives it back."""
        self._outlets.tell(kind, **facts)

    def alert(
        self, level: str, title: str, text: str, step: int | None = None, site: str | None = None
    ) -> None:
        """Tell the sinks that have a place for alerts; ``level`` is info, warning or error."""
        self._outlets.alert(level, title, text, step, site)

    @property
    def live(self) -> bool:
        """Whether any tap is live in the open step."""
        return bool(self._maker.taps.armed)

    @property
    def lost(self) -> list[str]:
        """What could not be kept, a sentence each: by the watch, by the run's writer, by the sinks."""
        return self._outlets.lost

    @property
    def step_number(self) -> int:
        """The step that is open, or the one that ended last; -1 before the first."""
        if self._lull.holds_any:
            return self._lull.newest
        moment = self._maker.open or self._maker.last
        return -1 if moment is None else moment.step

    @property
    def passes(self) -> int:
        """How many times the model was called while a step was open and a tap live."""
        return self._receiver.passes

    def structure(self, path: str) -> object:
        """The structure of a module's output where it is not one tensor: names of leaves stand for tensors."""
        port = self._receiver.ports.get((path, "output", ""))
        return None if port is None else port.structure

    def _hand_on(self, record: StepRecord) -> None:
        self._handed_on += 1
        self._newest.add(record)
        self._sites.before(record, self._maker.taps.receiver.entries)
        self._outlets.write(record)

    def described_sites(self) -> list[dict[str, Any]]:
        """What was found out about the sites since the plan was made, in the order of execution."""
        return self._sites.described(self._receiver.entries)

    def coverage(self) -> list[Missing]:
        """Each site that the plan expects and that did not arrive so far, with the reason."""
        from torchtap.session.coverage import missing_sites

        return missing_sites(self._receiver, self._maker.ever_live)

    def summary(self, file: IO[str] | None = None) -> None:
        """Print the newest statistics of each site as a table."""
        from torchtap.session.summary import print_summary

        self._maker.settle()
        print_summary(self._newest.blocks(), self.coverage(), self.lost, file)

    def latest(self, site: str, statistic: str = "value", phase: str | None = None) -> float:
        """The newest number of a site, of any phase if none is named."""
        self._maker.settle()
        return self._newest.number(site, statistic, phase)

    def so_far(self) -> StepRecord | None:
        """The open step's statistics as they are now, of the passes that train; None if there are none yet.

        For whoever decides something before the step is over. The step goes on and is recorded as a whole.
        """
        return self._maker.so_far()

    def flush(self) -> None:
        """Have everything so far on disk and visible to readers."""
        self._maker.settle()
        self._outlets.flush()

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the open step, write the coverage, take every hook off, close the run and the sinks."""
        if self._closed:
            return
        try:
            clockless = self._steps.last is None and self._steps.open is None
            self._steps.close()
            self._tell_what_is_odd(clockless)
        finally:
            self._closed = True
            self._steps.stop_hearing()
            if self._following is not None:
                self._following.stop()
            self._steps.taps.detach()
            if self._outlets.keep_events:
                self._sites.tell(self._receiver.entries)
                missing = [{"site": each.site, "reason": each.reason} for each in self.coverage()]
                self._outlets.tell("coverage", missing=missing)
            self._outlets.close()

    def _tell_what_is_odd(self, clockless: bool) -> None:
        if clockless and self.passes > 1:
            self._hint_no_clock()
        if not self._newest and not self._handed_on:
            self._outlets.hint(
                "empty", "this watch recorded nothing; watch.coverage() says why for each site"
            )
        if told := self._evaluations.told():
            self._outlets.hint("evaluations", told)
        if self._receiver.late:
            self._outlets.hint(
                "late",
                f"{self._receiver.late} gradient(s) came after their step was over and are in no record: "
                "have the backward pass in the step of its forward pass",
            )

    def __repr__(self) -> str:
        steps, lull = self._maker, self._lull
        last = lull.last if lull.holds_any or steps.last is None else steps.last.step
        is_open = lull.open >= 0 if lull.holds_any else steps.open is not None
        if self._closed:
            state = "closed"
        elif is_open and not steps.fresh:
            state = f"in step {self.step_number}"
        elif last >= 0:
            state = f"after step {last}"
        else:
            state = "before the first step" + ("" if self._following else ", no clock yet")
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
