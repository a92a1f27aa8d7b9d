"""The steps of a watched training: which pass belongs to which step and phase, and when a record is whole.

It guarantees:
- a record has one step and one phase; passes of different phases never fold together;
- an evaluation outside of a step belongs to the step that ended last, before the first step to that one. It never
  makes a step and never shifts a number;
- a schedule is judged for each pass, with the pass's own phase;
- numbers that are logged after an update belong to the step that the update ended;
- steps before the next one that any schedule asks for are only counted (`lull`);
- the host does not wait at a step's end for numbers of a device that copies by itself: such a step's records are
  handed on when they are there, at the latest when the next step ends or when anyone asks. Records keep their order.

Not here: who moves the clock (`watching`, `following`), where records go (`outlets`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, final

from torchtap.plan.plan import Plan
from torchtap.receive.collect import PendingNumbers
from torchtap.receive.entries import Tally
from torchtap.schedule.base import Moment
from torchtap.session.clock import Clock
from torchtap.session.logged import Logged
from torchtap.session.lull import Lull
from torchtap.session.outlets import Outlets
from torchtap.session.partial_record import PartialRecord
from torchtap.session.tapping import Tapping
from torchtap.store.record import StepRecord

if TYPE_CHECKING:
    from torchtap.session.spending import Spending

__all__ = ["StepMaker"]

_When: TypeAlias = tuple[int, int | None, int | None, str]
_MOMENTS = 16  # of which the live taps are remembered, before those of old steps are forgotten


@final
class StepMaker:
    """Sorts passes into steps and phases, and makes the records."""

    def __init__(
        self,
        plan: Plan,
        tap: Callable[[StepMaker], Tapping],
        outlets: Outlets,
        hand_on: Callable[[StepRecord], None],
        *,
        is_training: Callable[[], bool],
        on_no_clock: Callable[[], None],
        first: int = 0,
    ) -> None:
        self._plan = plan
        self.clock = Clock(first)
        self.logged = Logged()
        self.lull = Lull()
        self._catching_up = threading.Lock()
        self.ever_live: frozenset[int] = frozenset()
        self.taps = tap(self)
        self._outlets = outlets
        self._hand_on = hand_on
        self._is_training = is_training
        self._on_no_clock = on_no_clock
        self._spending: Spending | None = None  # where no tap has a budget
        if plan.fallbacks:
            from torchtap.session.spending import Spending

            self._spending = Spending(plan, self.taps.receiver, outlets.note_spent)
        self.open: Moment | None = None  # the open step
        self.last: Moment | None = None  # the step that ended last
        self.fresh = False  # no pass of the open step has come, so what comes may still belong to the last
        self._undecided = False  # passes have come of which only the next event tells the step
        self._learning: str | None = None  # the phase whose passes have gradients
        self._has_learnt = False  # whether any step had such passes
        self._phases: dict[str, None] = {}  # of the open step, in order
        self._live: dict[_When, frozenset[int]] = {}  # by step, epoch, batch and phase
        self._asked: tuple[Moment, frozenset[int]] | None = (
            None  # the newest of these: it is asked for most often
        )
        self._held: list[PartialRecord] = []  # of the last step: numbers may still be logged for it
        self._waiting: list[PartialRecord] = []  # whole but for numbers that are on their way
        self.passes_before = 0  # of training, before the clock was moved for the first time

    # -- what the receiver asks ---------------------------------------------------------------------------

    def pass_begins(self, phase: str, learning: bool) -> frozenset[int] | None:
        """The taps that are live in a pass; None for one that belongs to no step."""
        moment = self.open
        if moment is None:
            moment = self._outside_of_steps(phase)
            if moment is None:
                return None
        elif self.fresh:
            moment = self._place_fresh(phase, learning, moment)
        if learning and (phase == "train" or self._learning is None):
            self._learning = phase
        self._phases.setdefault(phase)
        return self.live_at(moment, phase)

    def _outside_of_steps(self, phase: str) -> Moment | None:
        """The step of a pass that comes while none is open: the one before, or the first; None if it has none."""
        if self.last is None:
            moment = self._coming_first()
            self.passes_before += phase == "train"
            if self.passes_before == 2:
                self._on_no_clock()
            return moment
        if phase != "train":
            return self.last
        self._outlets.hint(
            "between",
            f"a training pass came after step {self.last.step} and before the next one; it is in no record. "
            "Have the pass inside `with watch.step():`, or let watch.follow(optimizer) move the clock",
        )
        return None

    def _place_fresh(self, phase: str, learning: bool, moment: Moment) -> Moment:
        """The step of a pass that comes before the first training pass of the open one."""
        if phase == "train":
            self.leave_last()
            return moment
        if not learning:
            return self.last or moment
        # A model may be trained in evaluation mode: whether this pass was training, the next update tells.
        if not self._undecided:
            self._collect(self.last or moment)
            self._undecided = True
        return moment

    def state_phase(self) -> tuple[str, frozenset[int]]:
        """The phase that parameters and gradients belong to now: that of the passes that learn."""
        if self.fresh:  # an update comes: whatever is undecided belongs to the open step
            if self._undecided:
                self.fresh = False
                self._release_for(self.last)
            else:
                self.leave_last()
        phase = self._learning or self.taps.receiver.phase
        if phase is None:
            phase = "train" if self._is_training() else next(iter(self._phases), "eval")
        return phase, self.live_at(self.open or self.last or self._coming_first(), phase)

    def live_at(self, moment: Moment, phase: str) -> frozenset[int]:
        """The taps that are live at a step in a phase."""
        always = self._plan.always
        if always is not None and self._spending is None:
            return always
        if not self._plan.by_phase:
            if self._asked is not None and self._asked[0] is moment:
                return self._asked[1]
            phase = moment.phase
        when = (moment.step, moment.epoch, moment.batch, phase)
        live = self._live.get(when)
        if live is None:
            live = self._plan.live(moment if moment.phase == phase else Moment(*when))
            if self._spending is not None:
                live = self._spending.replaced(live)
            self._live[when] = live
        self._asked = moment, live
        return live

    def live_after_last(self, phase: str) -> bool:
        """Whether any tap is live in a pass of this phase that belongs to the step that ended last."""
        moment = self.last or self.open or self._coming_first()
        return bool(self.live_at(moment, phase))

    def wanted_next(self, step: int | None) -> frozenset[int]:
        """The taps that may be live in the step that comes next, or in the one with this number."""
        return self._wanted(self.clock.coming(step))

    def _coming_first(self) -> Moment:
        return replace(self.clock.moment(), step=self.clock.following)

    def so_far(self) -> StepRecord | None:
        """The statistics of the passes of the open step that learn, as they are now; the step goes on."""
        tally = self.taps.tallies.get(self._learning or "train")
        block = None if tally is None or self.open is None else self.taps.peek(tally)
        if block is None or tally is None or self.open is None:
            return None
        at = replace(self.open, phase=tally.phase)
        return PartialRecord(at, tally.passes, False, (block,), (), []).record()

    # -- steps --------------------------------------------------------------------------------------------

    def listen_before(self) -> None:
        """Nobody has moved the clock yet. Passes are taken, of any thread; whose they are the first step tells."""
        self.taps.receiver.begin_step(None)
        self.taps.arm(self._wanted(self._coming_first()))

    def begin(
        self, step: int | None, thread: int, *, fresh: bool = False, wanted: frozenset[int] | None = None
    ) -> None:
        """The next step begins. ``fresh``: what comes before its first training pass belongs to the last one.

        ``wanted`` is what `wanted_next` says, where somebody has asked already.
        """
        if not fresh and self._holds_anything:
            self.leave_last()
        if self._waiting:
            self._let_go()
        before = self.last is None and self.open is None
        self.clock.next_step(step)
        self.open = moment = self.clock.moment()
        if before:
            self._sort_early(moment)
        self.fresh, self._undecided = fresh, False
        self._phases = {}
        self._learning = None
        if len(self._live) > _MOMENTS:
            self._forget_others_than(moment, self.last or moment)
        if self._spending is not None:
            self._spending.begin_step()
        self.taps.receiver.begin_step(thread)
        if wanted is None:
            wanted = self._wanted(moment)
        if wanted or self.taps.armed:
            self.taps.arm(wanted)

    def rest(self) -> None:
        """A step has begun. Where it and others after it ask for nothing, they are only counted from here on."""
        moment, lull = self.open, self.lull
        if moment is None or self.taps.armed or self._holds_anything:
            return
        until = self._plan.earliest(replace(moment, step=moment.step + 1))
        if until > moment.step + 1:
            lull.last = -1 if self.last is None else self.last.step
            lull.open, lull.until = moment.step, until

    @property
    def _holds_anything(self) -> bool:
        """Whether there is anything to hand on, now or when numbers have arrived."""
        if self._held or self._waiting or not self.logged.empty:
            return True
        for tally in self.taps.tallies.values():  # noqa: SIM110 (a generator takes longer)
            if tally.touched:
                return True
        return False

    def catch_up(self) -> None:
        """Something is to happen: the steps of a lull become steps like all others. Any thread may call it."""
        lull, clock = self.lull, self.clock
        with self._catching_up:
            lull.until = -1
            while lull.holds_any:
                last, opened = lull.last, lull.open
                clock.step = max(clock.step, last, opened)
                if last > (-1 if self.last is None else self.last.step):
                    self.last = Moment(last, clock.epoch, clock.batch)
                self.open = Moment(opened, clock.epoch, clock.batch) if opened >= 0 else None
                if lull.last == last and lull.open == opened:  # else a block has just ended
                    lull.last = lull.open = -1

    def _forget_others_than(self, *moments: Moment) -> None:
        """Forget which taps are live at other moments."""
        kept = [moment.step for moment in moments]
        self._live = {when: live for when, live in self._live.items() if when[0] in kept}

    def _sort_early(self, moment: Moment) -> None:
        """Passes that came before the first step: evaluations are recorded with it, training passes have no step."""
        training = self.taps.tallies.get("train")
        if training is not None and training.passes:
            self._outlets.hint(
                "early",
                f"{training.passes} training pass(es) came before the first step and are in no record",
            )
        if training is not None:
            self.taps.drop(training)
        self._collect(moment)
        self._release()

    def change_taps(self, tap: Callable[[StepMaker], Tapping]) -> Tapping:
        """The model has other modules now: what the taps hold is collected, and others take their place."""
        if self.last is not None:
            self._collect(self.last)
        else:
            self._sort_early(self._coming_first())
        before = self.taps
        before.receiver.end_step()
        before.detach()
        self.taps = tap(self)
        self.taps.receiver.follow(before.receiver)
        self._plan = self.taps.plan
        if self._spending is not None:
            self._spending.turn_to(self._plan, self.taps.receiver)
        return self.taps

    def adopt_early(self, thread: int) -> None:
        """The first step is open already: passes that came before the clock was set belong to it."""
        self.clock.next_step()
        self.open = self.clock.moment()
        for tally in list(self.taps.tallies.values()):
            if tally.phase != "train":
                self._collect_one(self.open, tally)
        self._release()
        self.taps.receiver.begin_step(thread)

    def end(self, *, skipped: bool = False) -> bool:
        """The open step is over: its values are collected, and held for what is still logged. Says if there are any."""
        moment, self.open = self.open, None
        if moment is None:
            return False
        if self.fresh:
            if not self._undecided:
                self._collect(self.last or moment)
            self._release_for(self.last)
        self.last = moment
        self.fresh = False
        if self._waiting:
            self._let_go(all_of_them=True)
        if not self.taps.armed:
            # Most steps of most trainings: the code below would have to be fetched from memory to find nothing.
            return False
        self.taps.read_state()
        if self._learning is not None:
            self._has_learnt = True
        elif self._has_learnt and self._phases:
            self._tell_of_evaluation(moment)
        if len(self.ever_live) < len(self._plan.taps):
            self.ever_live |= self.state_phase()[1]
        if not self.taps.receiver.passes and self.taps.listens_to_passes:
            self._outlets.hint(
                "silent",
                f"step {moment.step} is over and no call of the model was seen. Where a compiled or wrapped model "
                "is called, give torchtap that one",
            )
        return self._collect(moment, skipped=skipped)

    def _tell_of_evaluation(self, moment: Moment) -> None:
        """A block is a step because the user says so, also one that holds no training among others that do."""
        self._outlets.hint(
            "evaluation",
            f"step {moment.step} holds passes of {', '.join(self._phases)} only, and took a number among the "
            "steps of the training. Have evaluations outside of steps: they belong to the step that ended last",
        )

    def stop_hearing(self) -> None:
        """Nothing is heard any more."""
        self.taps.receiver.end_step()

    def leave_last(self) -> None:
        """Nothing more belongs to the step that ended last: hand its records on."""
        self.fresh = False
        at = self.last or self.open
        if at is not None:
            if self.taps.tallies:
                self._collect(at)
            self._release_for(self.last)  # before the first step has ended, what is logged is the open one's

    def release(self) -> None:
        """The step that ended last is whole: nothing is logged for it any more."""
        if self._held or not self.logged.empty:
            self._release_for(self.last)

    def settle(self) -> None:
        """Hand on whatever is whole, waiting for numbers that are on their way."""
        if self.open is None or self.fresh:
            self._release_for(self.last or self._coming_first())
        self._release()
        self._let_go(all_of_them=True)

    def close(self) -> None:
        """The end: what was taken before any clock was moved makes one step."""
        if self.open is None and self.last is None:
            holds = [tally for tally in self.taps.tallies.values() if self.taps.holds_anything(tally)]
            if holds or self.logged.phases:
                self.clock.next_step()
                self.last = self.clock.moment()
                if holds:
                    self.taps.read_state()
        elif self.open is not None:
            self._close_open()
        self.leave_last()
        self.settle()
        self.stop_hearing()

    def _close_open(self) -> None:
        """A step that never began in earnest, such as the one after the last update, is none."""
        if not self.fresh:
            self.end()
        else:
            moment, self.open = self.open, None
            self.last = self.last or moment

    # -- records ------------------------------------------------------------------------------------------

    def _wanted(self, moment: Moment) -> frozenset[int]:
        """The taps that any pass of this step may want."""
        wanted = self.live_at(moment, "train")
        if not self._plan.by_phase:
            return wanted
        named = self.taps.receiver.phase
        wanted |= self.live_at(moment, "eval")
        return wanted if named is None else wanted | self.live_at(moment, named)

    def rearm(self, *, evaluation: bool = True) -> None:
        """The phases that may come have changed: an evaluation may still belong to the last step."""
        moment = self.open or self.last or self._coming_first()
        wanted = self._wanted(moment)
        if evaluation and self.last is not None and (self.fresh or self.open is None):
            wanted |= self._wanted(self.last)
        if wanted != self.taps.armed:
            self.taps.arm(wanted)

    def relabel(self) -> None:
        """Epoch or batch were set: they are those of the open step."""
        if self.open is not None:
            self.open = self.clock.moment()

    def _collect(self, moment: Moment, *, skipped: bool = False) -> bool:
        """Make parts of what the phases hold, those that train first."""
        tallies: Iterable[Tally] = self.taps.tallies.values()
        if len(self.taps.tallies) > 1:
            tallies = sorted(tallies, key=lambda tally: tally.phase != self._learning)
        made = False
        for tally in tallies:
            made |= self._collect_one(moment, tally, skipped=skipped)
        return made

    def _collect_one(self, moment: Moment, tally: Tally, *, skipped: bool = False) -> bool:
        if not tally.touched:
            return False
        if not tally.live <= self.ever_live:
            self.ever_live |= tally.live
        passes = tally.passes
        scalars, tensors, coming = self.taps.collect(tally)
        if not (scalars or tensors):
            return False
        if self._spending is not None:
            tensors = self._spending.end_step(moment.step, tensors, tally)
        at = moment
        if moment.phase != tally.phase:
            at = Moment(moment.step, moment.epoch, moment.batch, tally.phase)
        self._held.append(PartialRecord(at, passes, skipped, scalars, tensors, coming))
        return True

    def _release_for(self, moment: Moment | None) -> None:
        """Put what was logged into the parts of a step, and let these go."""
        if moment is not None and not self.logged.empty:
            for phase in self.logged.phases:
                part = next((part for part in self._held if part.moment.phase == phase), None)
                coming: list[PendingNumbers] = []
                scalars, tensors = self.logged.take(phase, coming)
                if part is None:
                    at = replace(moment, phase=phase)
                    self._held.append(PartialRecord(at, 0, False, scalars, tensors, coming))
                else:
                    part.scalars, part.tensors = (*part.scalars, *scalars), (*part.tensors, *tensors)
                    part.coming += coming
        self._release()

    def _release(self) -> None:
        if self._held:
            if self._waiting:
                self._let_go(all_of_them=True)
            self._waiting, self._held = self._held, []
            self._let_go()

    def _let_go(self, *, all_of_them: bool = False) -> None:
        """Hand on the records whose numbers are there, in order."""
        while self._waiting and (all_of_them or self._waiting[0].whole):
            self._hand_on(self._waiting.pop(0).record())
