"""A doctor beside a training: record what rules need, judge at the end of live steps, report what they find.

It guarantees:
- losses, gradients and random numbers of the training are those without it;
- between live steps the model carries no tap; listening to each backward and update costs microseconds;
- a rule or a probe that fails costs itself only;
- the findings are those that `diagnose` gives on the finished run.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, final

from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap._torch import RunningNorm
from torchtap._torch_distributed import fsdp_sharded
from torchtap.diagnosis.chart import FACT, LEARNED, LOSS, STRUCTURE, Block, Chart, Fact, Structure
from torchtap.diagnosis.diagnose import RuleRunner
from torchtap.diagnosis.finding import Finding, Findings
from torchtap.diagnosis.probes.base import Patient, Probe
from torchtap.diagnosis.probes.loop import GradientProbe, LoaderProbe, MembershipProbe, ModeProbe, UpdateProbe
from torchtap.diagnosis.probes.losses import LossProbe
from torchtap.diagnosis.probes.model import FunctionProbe, HiddenProbe, PaddingProbe, WeightProbe
from torchtap.diagnosis.probes.on_demand import ExperimentProbe
from torchtap.diagnosis.probes.ranks import RankProbe, TargetProbe
from torchtap.diagnosis.pulse import PULSE, Pulse, Table
from torchtap.diagnosis.rule_type import Rule
from torchtap.diagnosis.rules import all_rules
from torchtap.errors import PlanError, TrainingStoppedError
from torchtap.forms.attach import tree_of
from torchtap.plan.names import kind_of, site_name
from torchtap.plan.next_live import Pace, Seldom
from torchtap.plan.tap import Tap, tap
from torchtap.rank_identity import identity
from torchtap.receive import backward, training
from torchtap.reduce import Fingerprint, SampleSpread, Units
from torchtap.sanitize import say
from torchtap.session.capture import watch
from torchtap.session.watch import Watch
from torchtap.spi import Consumer, StepListener, StepRecord, places

_OF_PARAMETERS = ("param", "param_grad", "update")
_COPIES = 16
_LARGEST_COPY = 1 << 22  # elements
_FIRING = (nn.ReLU, nn.ReLU6)  # units that do not fire are exactly zero
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def doctor_taps(model: nn.Module, pace: Pace, roots: tuple[str, ...] = ("",)) -> list[Tap]:
    """Taps for all rules; ``roots`` are the paths of the models that are called.

    Of the first steps, which are all looked at, not all is read: gradients of outputs, which are as large as these, in
    one of two; parameters, which change little, and what the optimizer did to them, which takes a copy, in one of four.
    """
    alone = identity().world == 1
    second = Seldom(pace, 2)
    seldom = Seldom(pace, 4) if alone else pace  # ranks are compared by what they hold at each step
    taps = [tap("*:output", when=pace), tap("*:grad_output", when=second)]
    if _has_parameters(model):
        taps.append(tap("*:param_grad", when=pace))
        taps += [tap(f"*:{kind}", when=seldom) for kind in ("param", "update")]
    taps.append(tap(":lr", when=pace))
    for root in roots:
        taps += [tap(f"{root}:input", when=pace), tap(f"{root}:input", SampleSpread(), when=pace)]
        taps.append(tap(f"{root}:output", SampleSpread(), when=pace))
    layers = [kind for kind in _LAYERS if any(isinstance(module, kind) for module in model.modules())]
    firing = [kind for kind in _FIRING if any(isinstance(module, kind) for module in model.modules())]
    if firing:
        taps.append(tap(firing, Units(which=False), when=second))
    if layers:
        taps.append(tap(layers, Units(dim=0, which=False), kind="param_grad", when=second))
    return [*taps, *(_running_statistics(model, seldom) if alone else _among_ranks(model, pace))]


def _running_statistics(model: nn.Module, pace: Pace | Seldom) -> list[Tap]:
    """What norms have gathered, where there are any."""
    norms = [each for each in model.modules() if isinstance(each, RunningNorm) and each.track_running_stats]
    kinds = list(dict.fromkeys(map(type, norms)))
    return [tap(kinds, kind="buffer", when=pace)] if kinds else []


def _among_ranks(model: nn.Module, pace: Pace) -> list[Tap]:
    """What tells ranks from each other: fingerprints of what they hold alike, and gradients before they are reduced."""
    taps = []
    if _has_parameters(model):
        taps += [tap(f"*:{kind}", Fingerprint(), when=pace) for kind in _OF_PARAMETERS]
        local = _some_local_gradients(model)
        if local:
            taps += [tap(local, when=pace), tap(local, Fingerprint(), when=pace)]
    if any(True for _ in model.buffers()):
        taps.append(tap("*:buffer", when=pace))
    return taps


def _some_local_gradients(model: nn.Module) -> list[str]:
    """Gradients before ranks average them, of a few parameters that are spread over the model: each is copied for it.

    FSDP hands out reduced gradients alone.
    """
    if fsdp_sharded(model):
        return []
    found = [
        site_name(place.path, "param_grad_local", leaf)
        for place in places(model)
        for leaf, parameter in place.module._parameters.items()
        if parameter is not None and parameter.requires_grad and parameter.numel() <= _LARGEST_COPY
    ]
    return found[:: max(1, -(-len(found) // _COPIES))]


def _has_parameters(model: nn.Module) -> bool:
    return any(True for _ in model.parameters())


StopAt = Literal["error", "warning"]
DISK = 2_000_000_000  # bytes of a run whose plan the user did not choose; older records are thinned out
_LOSS_LOOKS = 16  # steps between two looks where nothing but the loss is recorded
_STANDSTILL = 2  # backward passes after which rules are asked about a fact at once, not when the step ends
_CLOSE_LOOKS = 24  # records after each of which rules are asked; then after every few


def doctor(
    model: Any,
    *optimizers: Any,
    run: str | os.PathLike[str] | None = None,
    every: int = 10,
    dense: int = 50,
    share: float | None = 0.02,
    sinks: Sequence[Consumer] = (),
    on_finding: Callable[[Finding], None] | None = None,
    stop: StopAt | None = None,
    rules: Sequence[Rule] | None = None,
    quiet: bool = False,
    labels: dict[str, Any] | None = None,
    probe: bool | None = None,
) -> Doctor:
    """Have a doctor beside a training: it says what is wrong, by its cause, while it happens.

    ``optimizers`` move the clock. ``run`` keeps the records in a folder. The first ``dense`` steps are looked at, then
    one in ``every``, or more seldom where that takes more than ``share`` of the time. A finding is a line on standard
    error (unless ``quiet``), an alert of the ``sinks``, and a call of ``on_finding``. ``stop="error"`` raises
    `TrainingStoppedError` before the next update once an error was found; ``"warning"`` for warnings too.
    ``probe=True`` experiments on a copy of the model after the second update, which needs the memory for it.
    None reads the environment variable ``TORCHTAP_PROBE``.
    """
    if stop not in (None, "error", "warning"):
        raise PlanError(f"stop={stop!r}: give 'error', 'warning' or None")
    if not optimizers:
        raise PlanError("doctor(model, optimizer): give the optimizer, whose updates end the steps")
    pace = Pace(every, share, dense, evaluations=False)  # rules judge what learns
    experiments = bool(os.environ.get("TORCHTAP_PROBE")) if probe is None else probe
    return Doctor(model, optimizers, pace, run, sinks, on_finding, stop, rules, quiet, labels, experiments)


@final
class Doctor(StepListener):
    """Made by `doctor`. A context manager; also closed by `close`."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        pace: Pace,
        run: str | os.PathLike[str] | None,
        sinks: Sequence[Consumer],
        on_finding: Callable[[Finding], None] | None,
        stop: StopAt | None,
        rules: Sequence[Rule] | None,
        quiet: bool,
        labels: dict[str, Any] | None,
        experiments: bool = False,
    ) -> None:
        self._on_finding, self._stop_at, self._quiet = on_finding, stop, quiet
        self._stopped_by: Finding | None = None
        models = list(model.values()) if isinstance(model, dict) else [model]
        roots = tuple(model) if isinstance(model, dict) else ("",)
        tree = tree_of(nn.ModuleDict(model) if isinstance(model, dict) else model)
        self._chart = Chart(self._facts_of_sites)
        self._runner = RuleRunner(self._chart, all_rules()[0] if rules is None else rules)
        self._process = os.getpid()
        self._alone = len(models) == len(optimizers) == 1
        self._backwards = 0  # since the last record
        self._records = 0
        self._loss_now: Tensor | None = None  # kept where a bad one stops the training
        self._left_out: deque[int] = deque(maxlen=8)  # steps whose update a scaler left out
        self._closed = False
        self.seconds = 0.0  # that rules have taken
        limit: dict[str, Any] = {} if run is None else {"disk": DISK}
        self.watch: Watch = watch(
            model,
            run,
            doctor_taps(tree, pace, roots),
            sinks=[*sinks, _Clerk(self)],
            labels=labels,
            **limit,
        )
        self._patient = Patient(tree, models)
        self._probes = [
            *self._made_probes(),
            *([ExperimentProbe(self._patient, self)] if experiments else []),
        ]
        self.watch.follow(*optimizers)
        self.watch.note(PULSE, parameters=list(self._patient.names.values()))
        self._chart.parameters = list(self._patient.names.values())
        for probe in self._probes:
            probe.start()
        # After the probes: a loss that is NaN is theirs to see first.
        backward.listen(self)
        training.listen(self)

    def _made_probes(self) -> list[Probe]:
        patient = self._patient
        modes = ModeProbe(patient, self)
        among_ranks: list[Probe] = [RankProbe(patient, self), TargetProbe(self)]
        return [
            *(among_ranks if identity().world > 1 else ()),
            GradientProbe(patient, self),
            MembershipProbe(patient, self, self._take_structure),
            WeightProbe(patient, self),
            HiddenProbe(patient, self),
            LossProbe(patient, self, alone=self._alone),
            UpdateProbe(patient, self),
            modes,
            FunctionProbe(patient, self, modes),
            PaddingProbe(patient, self),
            LoaderProbe(self),
            Pulse(self._patient.called, patient.names, lambda: self.step, self._take_pulse),
        ]

    # -- what probes tell ---------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Return True if this step is looked at."""
        return self.watch.live and os.getpid() == self._process

    @property
    def step(self) -> int:
        """The number of this step, from 0."""
        return max(0, self.watch.step_number)

    def fact(self, name: str, site: str, value: float = 0.0, text: str = "", step: int | None = None) -> None:
        """A fact of this step, or of another; told once for each name and site."""
        if os.getpid() != self._process:
            return  # a worker that was forked from the training's process
        fact = Fact(name, site, self.step if step is None else step, value, text)
        if self._chart.note(fact):
            self.watch.note(FACT, **fact.to_dict())
            if self._backwards > _STANDSTILL:
                self._look()  # no update ends a step, so no record comes

    def number(self, site: str, value: float | Tensor) -> None:
        """A number of this step."""
        self.watch.log({site: value})

    def _take_pulse(self, rows: Table) -> None:
        """Put rows of the pulse into the chart and the run, and judge by them."""
        began = time.perf_counter()
        self.watch.note(PULSE, rows=rows)
        self._chart.add_pulse(rows)
        for finding in self._runner.look(pulse=True):
            self._tell(finding)
        self.seconds += time.perf_counter() - began

    def _take_structure(self, structure: Structure) -> None:
        self._chart.structure = structure
        self.watch.note(STRUCTURE, **structure.to_dict())

    def _facts_of_sites(self) -> dict[str, dict[str, Any]]:
        ports = {port.site.name: {"class": type(port.site.module).__name__} for port in self.watch.plan.ports}
        seen = {each["name"]: each for each in self.watch.described_sites()}
        return {name: {**ports.get(name, {}), **seen.get(name, {})} for name in (*seen, *ports)}

    # -- the training -------------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is None or os.getpid() != self._process:
            return
        self.watch.add(loss=loss)
        self._loss_now = loss.detach() if self._stop_at is not None else None
        self._backwards += 1

    def backward_ends(self) -> None:
        pass

    def ready(self, optimizer: Optimizer) -> None:
        """The weights are still those of the step that a finding is of: here a training can be stopped."""
        if (
            self._stop_at is not None
            and self._loss_now is not None
            and not math.isfinite(float(self._loss_now))
        ):
            text = f"it is {float(self._loss_now)}"
            self.fact("loss-not-finite", LOSS, text=text)
            self._look()
        found, self._stopped_by = self._stopped_by, None
        if found is not None:
            raise TrainingStoppedError(
                f"stopped as asked (stop={self._stop_at!r}): {found.message}. {found.advice}"
            )

    def skipped(self, optimizer: Optimizer) -> None:
        self._left_out.append(self.step)

    # -- records ------------------------------------------------------------------------------------------

    def take(self, record: StepRecord) -> None:
        """Put a record into the chart, and ask the rules."""
        began = time.perf_counter()
        self._backwards = 0
        urgent = self._note_loss(record)
        trains = record.phase == "train"
        if record.passes and (trains or _learned(record)):
            self._chart.add(record.step, _blocks(record), passes=record.passes, skipped=record.skipped)
            self._records += 1
            if urgent or self._records <= _CLOSE_LOOKS or self._records % 4 == 0:
                self._look()
        elif trains and record.step in self._chart.steps[-1:]:
            self._chart.add(record.step, _blocks(record), passes=0)
        elif urgent or record.step % _LOSS_LOOKS == 0:
            self._look()
        self.seconds += time.perf_counter() - began

    def _note_loss(self, record: StepRecord) -> bool:
        """Put the loss into the chart. Returns True if it is not finite: the next update must not come first."""
        urgent = False
        for block in record.scalars:
            if LOSS in block.sites:
                loss = float(block.values[block.sites.index(LOSS), 0])
                self._chart.add_loss(record.step, loss)
                if not math.isfinite(loss) and record.step not in self._left_out:
                    self.fact("loss-not-finite", LOSS, text=f"it is {loss}", step=record.step)
                    urgent = True
        return urgent

    def _look(self) -> None:
        for finding in self._runner.look():
            self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        if not self._quiet and finding.severity != "info":
            since = "" if finding.step is None else f" (step {finding.step})"
            say(f"torchtap: {finding.kind}: {finding}{since}. {finding.advice}")
        self.watch.alert(finding.severity, finding.kind, finding.message, finding.step, finding.site)
        grave = finding.severity == "error" or (finding.severity == "warning" and self._stop_at == "warning")
        if self._stop_at is not None and grave and self._stopped_by is None:
            self._stopped_by = finding
        if self._on_finding is not None:
            self._on_finding(finding)

    # -- what comes out -----------------------------------------------------------------------------------

    def findings(self) -> Findings:
        """What was found so far, the gravest first; ``unjudged`` names the rules that could not judge."""
        return self._runner.findings()

    def close(self) -> None:
        """End the recording, leave the model and torch as they were, and ask the rules a last time."""
        if self._closed:
            return
        self._closed = True
        backward.stop_listening(self)
        training.stop_listening(self)
        for probe in reversed(self._probes):
            probe.stop()
        self.watch.close()
        self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class _Clerk:
    """Hands the watch's records to the doctor."""

    def __init__(self, doctor: Doctor) -> None:
        self._doctor = doctor

    def write(self, record: StepRecord) -> None:
        self._doctor.take(record)

    def close(self) -> None:
        pass


def _blocks(record: StepRecord) -> list[Block]:
    return [(block.sites, block.statistics, block.values, block.present) for block in record.scalars]


def _learned(record: StepRecord) -> bool:
    return any(kind_of(site) in LEARNED for block in record.scalars for site in block.sites[-64:])
