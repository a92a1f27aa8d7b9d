"""The flight recorder: keep the last steps of a training in memory, and write down the step that goes wrong.

Each step is judged when its gradients exist and before the optimizer uses them: the weights are still those that the
bad values stem from. It guarantees:
- nothing is on disk while all is well; memory is bounded (`steps` of numbers, `batch_bytes` of arguments);
- an incident costs time, never the training: the losses that follow are those of a training without a recorder;
- no collective of ours. Each rank writes its own part of the same step; a replay runs only on request, and each rank's
  model by itself;
- a failure here is reported in one warning, and the training goes on.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from torchtap._torch import foreach_norm, in_backward
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.flight.dump import Incident, Outcome, write_dump
from torchtap.diagnosis.flight.step import PassKeeper, StepSnapshot
from torchtap.errors import PlanError
from torchtap.plan.plan import Plan
from torchtap.plan.sites import Selectable
from torchtap.plan.tap import Tap
from torchtap.receive.training import innermost, listen, stop_listening
from torchtap.session.capture import watch
from torchtap.spi import LossCatcher, ScalarBlock, StepListener, StepRecord, parameters_of, unwrap, warn


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The norm of all these; None for no tensors. Half precision is widened, so that it does not overflow."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        if each.is_floating_point() and each.layout == torch.strided:
            groups.setdefault((each.device, each.dtype), []).append(each.detach())
    norms = [
        norm
        for (_, dtype), group in groups.items()
        for norm in foreach_norm(group, 2.0, torch.promote_types(dtype, torch.float32))
    ]
    if not norms:
        return None
    first = norms[0].device
    together: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(first, torch.float32) for norm in norms])
    )
    return together


_FEW, _LEAST = 8, 20  # numbers before anything counts as unusual, and before their spread does
_AS_SIGMA = 1.4826  # the median deviation of a normal distribution, as its standard deviation
_LEAST_SPREAD = (
    0.05  # of the median: a training that repeats itself exactly is not unusual at the first change
)


@final
class Ring:
    """A sink that keeps the numbers of the last steps in memory, and no tensors."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._records: deque[StepRecord] = deque()

    def write(self, record: StepRecord) -> None:
        """Take one step. An evaluation is of the step that it follows, and stays as long."""
        self._records.append(record)
        while self._records[0].step <= record.step - self._steps:
            self._records.popleft()

    def close(self) -> None:
        """Nothing to do."""

    @property
    def records(self) -> list[StepRecord]:
        """The oldest first."""
        return list(self._records)

    @property
    def nbytes(self) -> int:
        """What the numbers take."""
        return sum(block.values.nbytes for record in self._records for block in record.scalars)


@final
class Usual:
    """Says whether a number is far above its own history: the median and ``k`` times the spread around it."""

    def __init__(self, k: float, steps: int) -> None:
        self._k = k
        self._seen: deque[float] = deque(maxlen=steps)

    def limit(self) -> float:
        """Where unusual begins; infinity as long as too little was seen."""
        if len(self._seen) < _FEW:
            return math.inf
        if (
            len(self._seen) < _LEAST
        ):  # a spread of so few says little: only what is far beyond all of them counts
            return self._k * max(map(abs, self._seen))
        middle = statistics.median(self._seen)
        spread = statistics.median(abs(each - middle) for each in self._seen)
        return middle + self._k * max(_AS_SIGMA * spread, _LEAST_SPREAD * abs(middle))

    def judge(self, value: float) -> float | None:
        """The limit that the value is beyond, or None. A usual value becomes part of the history."""
        limit = self.limit()
        if math.isfinite(value):
            if value > limit:
                return limit
            self._seen.append(value)
        return None


def rows_with(block: ScalarBlock, *names: str) -> dict[str, float]:
    """The sites at which any of these statistics is above zero, with their sum."""
    columns = [block.statistics.index(name) for name in names if name in block.statistics]
    totals = block.values[:, columns].sum(axis=1)
    return {
        block.sites[row]: float(totals[row])
        for row in (totals > 0).nonzero()[0]
        if block.present is None or block.present[row]
    }


@final
@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What is known of a step just before its update."""

    values: ScalarBlock | None  # of the sites
    loss: float | None
    norm: float | None  # of all gradients, before they were clipped; None where a scaler left the update out


def _at_sites(counts: Mapping[str, float]) -> Incident:
    site, count = next(iter(counts.items()))
    more = f" and {len(counts) - 1} more sites" if len(counts) > 1 else ""
    return Incident("nonfinite", f"{count:,.0f} values that are not finite at {site}{more}", site)


@final
class Judge:
    """Knows what is usual in one training."""

    def __init__(self, k: float | None, steps: int) -> None:
        self._losses = None if k is None else Usual(k, steps)
        self._norms = None if k is None else Usual(k, steps)
        self._known: set[str] = set()  # sites that are not finite by design
        self._first = True

    def judge(self, numbers: StepNumbers) -> Incident | None:
        """Why this step is to be kept, or None."""
        found = self._nonfinite(numbers)
        if found is None:
            found = self._spike("loss", self._losses, numbers.loss) or self._spike(
                "gradient norm", self._norms, numbers.norm
            )
        self._first = False
        return found

    def _nonfinite(self, numbers: StepNumbers) -> Incident | None:
        bad = rows_with(numbers.values, "nans", "infs") if numbers.values is not None else {}
        odd = [
            Incident("nonfinite", f"{name} is {number}")
            for name, number in (("the loss", numbers.loss), ("the norm of the gradients", numbers.norm))
            if number is not None and not math.isfinite(number)
        ]
        if self._first and not odd and (numbers.loss is not None or numbers.norm is not None):
            self._known.update(bad)
        news = {site: count for site, count in bad.items() if site not in self._known}
        return _at_sites(news) if news else next(iter(odd), None)

    def _spike(self, what: str, usual: Usual | None, value: float | None) -> Incident | None:
        limit = usual.judge(value) if usual is not None and value is not None else None
        if limit is None:
            return None
        return Incident("spike", f"the {what} is {value:.4g}, beyond its own history (limit {limit:.4g})")


ASKING = "dump"  # a file of this name in the recorder's folder asks for a dump


@final
class Asked:
    """Notes that a dump was asked for, by a signal or by a file."""

    def __init__(self, folder: Path, number: int | None) -> None:
        self._folder = folder
        self._seen = 0
        self._signalled = False
        self._number = number if threading.current_thread() is threading.main_thread() else None
        if self._number is not None:
            self._before = signal.getsignal(self._number)
            signal.signal(self._number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> object:
        self._signalled = True
        if callable(self._before):
            return self._before(number, frame)
        return None

    def by_signal(self) -> bool:
        """Return True if the signal came since the last time."""
        came, self._signalled = self._signalled, False
        return came

    def folder_changed(self) -> bool:
        """Return True if anything came into the folder since the last time: a request, or another rank's incident."""
        try:
            now = os.stat(self._folder).st_mtime_ns
        except OSError:
            return False
        changed, self._seen = now != self._seen, now
        return changed

    def by_file(self) -> bool:
        """Return True if the file is there; it is taken away."""
        try:
            (self._folder / ASKING).unlink()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """Leave the signal to whom it belonged."""
        if self._number is not None and signal.getsignal(self._number) == self._on_signal:
            signal.signal(self._number, self._before)


@final
class Uncaught:
    """Tells of an exception that ends the program, before it does."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell
        self._before = sys.excepthook
        self._hook = self._on_exception  # one bound method, to be recognised again
        sys.excepthook = self._hook

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._tell(error)
        self._before(kind, error, trace)

    def stop(self) -> None:
        """Back to what was there, unless others came after us."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._before


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
class FlightRecorder(StepListener):
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
    """Return True if running a model by itself would talk to other ranks."""
    if _rank()[1] == 1:
        return False
    modules = [module for model in models.values() for module in model.modules()]
    return any(
        type(module).__name__ in ("SyncBatchNorm", "FullyShardedDataParallel")
        or any(hasattr(each, "device_mesh") for each in module._parameters.values() if each is not None)
        for module in modules
    )
