"""The flight recorder: accompanies a training in memory, and keeps the step that goes wrong.

Each step is judged when its gradients are there and before the optimizer uses them: the weights are still those that
the bad values came from. It guarantees:
- nothing is on disk while all is well; memory has a bound (`steps` of numbers, `batch_bytes` of arguments);
- an incident costs time, never the training: the losses that follow are those of a training without a recorder;
- no collective on our account. With ranks each writes its own part of the same step; a replay is made only where it was
  asked for, and it runs each rank's model by itself;
- whatever fails here is told in one warning, and the training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from torchtap._torch import in_backward
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.flight.dump import Outcome, write_dump
from torchtap.diagnosis.flight.history import Ring
from torchtap.diagnosis.flight.judge import Incident, Judge, StepNumbers
from torchtap.diagnosis.flight.moment import StepSnapshot
from torchtap.diagnosis.flight.norms import norm_of
from torchtap.diagnosis.flight.passes import PassKeeper
from torchtap.diagnosis.flight.signals import Asked, Uncaught
from torchtap.errors import PlanError
from torchtap.plan.plan import Plan
from torchtap.plan.sites import Selectable, unwrap
from torchtap.plan.tap import Tap
from torchtap.receive.ears import Ears
from torchtap.receive.losses import LossCatcher
from torchtap.receive.training import innermost, listen, parameters_of, stop_listening
from torchtap.session.front import watch
from torchtap.session.outlets import warn
from torchtap.store.record import StepRecord

__all__ = ["FlightRecorder", "flight_recorder"]

_STEP = "step-"  # how the folder of a dump begins


def flight_recorder(
    model: object,
    optimizer: object,
    folder: str | os.PathLike[str] = "flights",
    *,
    taps: Plan | Tap | Selectable | Iterable[Tap | Selectable | Sequence[Tap]] = "*:output",
    steps: int = 200,
    batches: int = 2,
    batch_bytes: int = 512 << 20,
    spike: float | None = 20.0,
    replay: bool | None = None,
    replay_bytes: int = 4 << 30,
    limit: int = 5,
    signal: int | None = None,
    on_dump: Callable[[Path, Outcome], None] | None = None,
) -> FlightRecorder:
    """Keep the last steps of a training in memory, and write them down with the bad step when something goes wrong.

    ``model`` is what the training calls, or several by name as in `watch`; ``optimizer`` one or a list. A dump is a run
    folder ``folder/step-…``. It is made before the update of a step with a value that is not finite, with a loss or
    gradient norm of more than median + ``spike`` deviations of its own history, on an exception, on ``signal`` (SIGUSR1
    if None, 0 for none), on a file ``folder/dump``, and when `trigger` is called; at most ``limit`` times.

    taps: whose statistics the ring holds. steps: so many of them. batches: of so many steps the arguments and random
    states too, in at most batch_bytes. replay: run the bad step again with whole tensors of every site; by default
    where there is only one rank. replay_bytes: of tensors at most, else samples. on_dump: called with the folder.
    """
    for name, value in (("steps", steps), ("batches", batches), ("limit", limit)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name}={value!r}: give a whole number from 1 on")
    models, optimizers = _models_of(model), _optimizers_of(optimizer)
    ring = Ring(steps)
    watching = watch(model, None, taps, sinks=[ring])
    return FlightRecorder(
        models, optimizers, Path(folder), watching, ring,
        judge=Judge(spike, steps), batches=batches, batch_bytes=batch_bytes, replay=replay,
        replay_bytes=replay_bytes, limit=limit, signal=signal, on_dump=on_dump,
    )  # fmt: skip


def _models_of(model: Any) -> dict[str, nn.Module]:
    models: dict[str, nn.Module] = dict(model) if isinstance(model, dict) else {"": model}
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise PlanError(
            f"flight_recorder({type(model).__name__}): give the nn.Module that the training calls, or {{name: module}}"
        )
    return models


def _optimizers_of(optimizer: object) -> list[Optimizer]:
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [found for each in several for found in innermost(each)]
    if not optimizers:
        raise PlanError(
            f"flight_recorder(…, {type(optimizer).__name__}): give the optimizer, or a list of them"
        )
    return optimizers


@final
class FlightRecorder(Ears):
    """Made by `flight_recorder`. A context manager; also closed by `close`. ``dumps`` are the folders so far."""

    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: Sequence[Optimizer],
        folder: Path,
        watching: Any,
        ring: Ring,
        *,
        judge: Judge,
        batches: int,
        batch_bytes: int,
        replay: bool | None,
        replay_bytes: int,
        limit: int,
        signal: int | None,
        on_dump: Callable[[Path, Outcome], None] | None,
    ) -> None:
        self.folder = folder
        self.dumps: list[Path] = []
        self.outcomes: list[Outcome] = []
        self._models, self._watch, self._ring, self._judge = models, watching, ring, judge
        self._replay, self._replay_bytes, self._limit, self._on_dump = replay, replay_bytes, limit, on_dump
        self._parameters = {id(p) for model in models.values() for p in model.parameters()}
        self._wanted: list[Incident] = []
        self._told: set[tuple[str, str]] = set()
        self._calm = True  # whether a step without an incident has come since the last one
        self._updating = False  # whether the weights are no longer those of the passes that are kept
        self._loss: Tensor | None = None
        self._norm: Tensor | None = None  # of the gradients, before they were clipped
        self._changed = False  # whether gradients were unscaled or clipped since they were computed
        self._closed = False
        self._found = {each.name for each in folder.glob(f"{_STEP}*")}
        self._keeper = PassKeeper(models, self._step, steps=batches, limit=batch_bytes)
        watching.follow(*optimizers)
        self._losses = LossCatcher(self._on_loss)
        self._losses.start()
        listen(self)
        self._asked = Asked(folder, _signal_number(signal))
        self._uncaught = Uncaught(self._on_exception)

    # -- what the user asks -------------------------------------------------------------------------------

    def trigger(self, reason: str = "asked for") -> None:
        """Keep the step that is under way; it is written before its update."""
        self._wanted.append(Incident("asked", reason))

    def finding(self, finding: Finding) -> None:
        """A rule has found something: an error keeps the step that is under way, once for each kind and site."""
        if finding.severity == "error" and (finding.kind, finding.site) not in self._told:
            self._told.add((finding.kind, finding.site))
            self._wanted.append(Incident("finding", finding.message, finding.site))

    @property
    def nbytes(self) -> int:
        """What the recorder holds in memory: numbers, and copies of arguments."""
        return self._ring.nbytes + self._keeper.nbytes

    # -- what the training tells --------------------------------------------------------------------------

    def unscaling(self, optimizer: Optimizer) -> None:
        self._changed = True

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        if self._norm is None:
            self._norm = norm_of(gradients)
        self._changed = True

    def ready(self, optimizer: Optimizer) -> None:
        if self._is_ours(optimizer):
            self._guarded(lambda: self._gate(optimizer, self._norm_for(optimizer)))

    def updated(self, optimizer: Optimizer) -> None:
        if self._is_ours(optimizer):
            self._next()

    def skipped(self, optimizer: Optimizer) -> None:
        """A scaler left the update out, as it does while it looks for its scale: such gradients are no incident."""
        if self._is_ours(optimizer):
            self._guarded(lambda: self._gate(optimizer, None))
            self._next()

    def _next(self) -> None:
        self._keeper.next_step()
        self._loss = self._norm = None
        self._changed = False

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(id(each) in self._parameters for each in parameters_of(optimizer))

    def _norm_for(self, optimizer: Optimizer) -> Tensor | None:
        if self._norm is not None:
            return self._norm
        gradients = [each.grad for each in parameters_of(optimizer)]
        return norm_of([each for each in gradients if each is not None])

    def _on_loss(self, loss: Tensor) -> None:
        loss = loss.detach().float()
        self._loss = loss if self._loss is None else self._loss + loss

    def _on_exception(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not self._closed:
            text = f"{type(error).__name__}: {error}"
            replaying = None if not isinstance(error, torch.OutOfMemoryError) else False
            self._guarded(lambda: self._keep(Incident("exception", text), replaying=replaying))

    # -- the gate -----------------------------------------------------------------------------------------

    def _gate(self, optimizer: Optimizer, norm: Tensor | None) -> None:
        """The step is whole and nothing is updated yet: is it to be kept?"""
        so_far = self._watch.so_far()
        values = so_far.scalars[0] if so_far is not None else None
        numbers = StepNumbers(values, _number(self._loss), _number(norm))
        found = self._judge.judge(numbers)
        asked = self._asked_from_outside()
        incident = asked or (found if self._calm else None)
        if found is not None:
            self._calm = False
        elif asked is None:
            self._calm = True
        if incident is not None:
            self._keep(incident)

    def _asked_from_outside(self) -> Incident | None:
        if self._asked.by_signal():
            self._wanted.append(Incident("asked", "a signal"))
        if self._asked.folder_changed():
            if self._asked.by_file():
                self._wanted.append(Incident("asked", "a file"))
            self._join_others()
        return self._wanted.pop(0) if self._wanted else None

    def _join_others(self) -> None:
        """Another rank has kept a step: write what is here of the same one."""
        if _rank()[1] == 1:
            return
        known = {path.name for path in self.dumps} | self._found
        for path in sorted(self.folder.glob(f"{_STEP}*")):
            digits = path.name.removeprefix(_STEP)
            if path.name not in known and digits.isdigit():
                step = int(digits)
                self._keep(Incident("rank", f"another rank kept step {step}"), step=step)

    def _keep(self, incident: Incident, *, step: int | None = None, replaying: bool | None = None) -> None:
        if len(self.dumps) >= self._limit:
            return
        now = self._step()
        step = now if step is None else step
        path = self.folder / f"{_STEP}{step:08d}"
        while path.name in self._found:  # of an earlier training in the same folder
            path = path.with_name(f"{path.name}-again")
        rank = _rank()
        if replaying is None or in_backward():
            replaying = self._may_replay(rank[1])
        records = self._records()
        with self._watch.paused(), self._keeper.paused():
            outcome = write_dump(
                path, self._models, self._moment(step, now, incident), incident, records,
                rank=rank, replaying=replaying, comparable=not self._changed and rank[1] == 1,
                replay_bytes=self._replay_bytes,
            )  # fmt: skip
        self.dumps.append(path)
        self.outcomes.append(outcome)
        warn(f"torchtap kept step {step} in {path}: {incident.reason}{_what_came_of_it(outcome)}")
        if self._on_dump is not None:
            self._on_dump(path, outcome)

    def _may_replay(self, ranks: int) -> bool:
        if in_backward():
            return False
        wanted = ranks == 1 if self._replay is None else self._replay
        return wanted and not _talks(self._models)

    def _records(self) -> list[StepRecord]:
        """The steps that are kept, and what is known of the one that is running."""
        so_far = self._watch.so_far()
        return [*self._ring.records, *([so_far] if so_far is not None else [])]

    def _moment(self, step: int, now: int, incident: Incident) -> StepSnapshot:
        kept = [*self._keeper.earlier, *([self._keeper.current] if self._keeper.current is not None else [])]
        notes = [
            f"{each.dropped} passes of step {each.step} did not fit batch_bytes"
            for each in kept
            if each.dropped
        ]
        steps = [each for each in kept if each.step <= step]
        if not steps or steps[-1].step != step:
            notes.append(
                f"no call of the model is kept of step {step}: give the recorder the module that is called"
            )
        if in_backward():
            notes.append(
                "an optimizer steps inside of the backward pass: the step is not whole, and is not replayed"
            )
        weights = (
            {name: unwrap(model).state_dict() for name, model in self._models.items()} if step == now else {}
        )
        return StepSnapshot(step, incident.reason, tuple(steps), weights, tuple(notes))

    def _step(self) -> int:
        return max(int(self._watch.step_number), 0)

    def _guarded(self, action: Callable[[], None]) -> None:
        """The training comes first."""
        try:
            action()
        except Exception as error:
            warn(f"torchtap: the flight recorder failed and goes on: {type(error).__name__}: {error}")

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take every hook off and forget the ring."""
        if self._closed:
            return
        self._closed = True
        stop_listening(self)
        self._losses.stop()
        self._asked.stop()
        self._uncaught.stop()
        self._keeper.stop()
        self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._on_exception(error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at step {self._step()}"
        return f"FlightRecorder({state}, {self.nbytes:,} bytes, {len(self.dumps)} dumps in {self.folder})"


def _signal_number(asked: int | None) -> int | None:
    if asked is not None:
        return asked or None
    import signal

    return getattr(signal, "SIGUSR1", None)


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


def _what_came_of_it(outcome: Outcome) -> str:
    birth = f"; {outcome.birth}" if outcome.birth is not None else ""
    return birth + ("; the replay did not give the same values" if outcome.reproduced is False else "")


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _talks(models: dict[str, nn.Module]) -> bool:
    """Whether running a model by itself would talk to other ranks."""
    if _rank()[1] == 1:
        return False
    modules = [module for model in models.values() for module in model.modules()]
    return any(
        type(module).__name__ in ("SyncBatchNorm", "FullyShardedDataParallel")
        or any(hasattr(each, "device_mesh") for each in module._parameters.values() if each is not None)
        for module in modules
    )
