"""A dump: the ring as an ordinary run, the kept step beside it, and the bad step replayed under full taps.

    step-00000123/            read by `torchtap.open`, `show`, `view`
        rank-0/ …             the last steps' numbers; step 123 again in phase ``replay``, with whole tensors
        moment/rank-0.pt      batch, weights, random state (`step`)

The models are left exactly as they were, whatever happens here. `offline` replays a dump in another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from torch import Tensor, nn

from torchtap.diagnosis.birth import Birth, Event, Search
from torchtap.diagnosis.flight.step import Replayed, StepSnapshot, copied, replay, with_arithmetic
from torchtap.errors import RunError
from torchtap.forms.attach import tree_of
from torchtap.plan.plan import make_plan
from torchtap.plan.tap import tap
from torchtap.progress import note
from torchtap.reduce import Full, Sample, Stats
from torchtap.session.capture import watch
from torchtap.sinks.local import MemorySink
from torchtap.spi import RunWriter, ScalarBlock, StepRecord, environment, untouched, unwrap
from torchtap.store.read.reader import open_run
from torchtap.store.write.manifest import run_manifest

REPLAYED = ["*:input", "*:output", "*:grad_input", "*:grad_output", "*:param_grad", "*:attention"]


@final
@dataclass(frozen=True, slots=True)
class Incident:
    """Why a step is kept."""

    kind: Literal["nonfinite", "spike", "finding", "exception", "asked", "rank"]
    reason: str  # one sentence
    site: str = ""


@final
@dataclass(slots=True)
class Outcome:
    """What is known of a kept step after it was replayed; goes into the run as the event ``incident``."""

    step: int
    trigger: str  # nonfinite, spike, finding, exception, asked, rank
    reason: str
    replayed: bool = False
    # Whether every number of the step came out the same, to the last bit; None where its numbers are also of passes
    # before another update of the same step.
    reproduced: bool | None = None
    differing: list[str] = field(default_factory=list)  # sites that did not
    gradients_equal: bool | None = (
        None  # the parameters'; None where they were clipped, unscaled or taken away since
    )
    birth: Birth | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "birth"}
        return {**facts, "birth": None if self.birth is None else self.birth.to_dict()}


def write_dump(
    folder: Path,
    models: Mapping[str, nn.Module],
    moment: StepSnapshot,
    incident: Incident,
    records: Sequence[StepRecord],
    *,
    rank: tuple[int, int],
    replaying: bool,
    comparable: bool,
    replay_bytes: int,
) -> Outcome:
    """Write everything of an incident into ``folder``. ``comparable``: nothing has changed the gradients since."""
    outcome = Outcome(moment.step, incident.kind, incident.reason, notes=list(moment.notes))
    holder: Any = models[""] if set(models) == {""} else nn.ModuleDict(dict(models))
    taps = _taps(records, moment.step, replay_bytes, outcome)
    plan = make_plan(tree_of(holder), taps)
    described = {**environment(), "rank": rank[0], "world_size": rank[1]}
    labels = {"flight": {"step": moment.step, "kind": incident.kind, "reason": incident.reason}}
    manifest = run_manifest(tree_of(holder), plan, described, labels)
    with RunWriter(folder, manifest=manifest, rank=rank[0], world=rank[1]) as writer:
        for record in records:
            writer.write(record)
        moment.save(folder, rank[0])
        if replaying and moment.passes and moment.weights:
            written = [record for record in records if record.step == moment.step]
            _replay_into(writer, models, moment, plan, written, comparable, outcome)
        writer.event("incident", **outcome.to_dict())
    return outcome


def _taps(records: Sequence[StepRecord], step: int, limit: int, outcome: Outcome) -> list[Any]:
    """Whole tensors, unless the step's own numbers say that these would be too many."""
    elements = 0.0
    for block in _blocks(records, step):
        if "count" in block.statistics:
            elements += float(np.nansum(block.values[:, block.statistics.index("count")]))
    if 4 * 4 * elements > limit:  # float32; inputs, outputs and the gradients of both
        outcome.notes.append(
            f"whole tensors would take more than {limit:,} bytes: samples of 1,024 elements are kept"
        )
        return [tap(REPLAYED, Sample(1024)), tap(REPLAYED, Stats())]
    return [tap(REPLAYED, Full()), tap(REPLAYED, Stats())]


def _replay_into(
    writer: RunWriter,
    models: Mapping[str, nn.Module],
    moment: StepSnapshot,
    plan: Any,
    written: Sequence[StepRecord],
    comparable: bool,
    outcome: Outcome,
) -> None:
    sink = MemorySink()
    before = {id(p): p.grad for model in models.values() for p in model.parameters()}
    result = reproduce(models, moment, plan, [_Kept(writer), sink])
    outcome.replayed = True
    if sum(record.passes for record in written) == len(moment.passes):  # else an update has come in between
        _compare(outcome, written, list(sink.records))
    if comparable:
        outcome.gradients_equal = _equal_gradients(before, result.gradients)
    if result.error is not None:
        outcome.notes.append(f"the replay raised {type(result.error).__name__}: {result.error}")
    outcome.birth = explain(models, moment)


def _equal_gradients(before: Mapping[int, Tensor | None], again: Mapping[int, Tensor]) -> bool | None:
    """Whether the replay's gradients are the step's bit for bit; None where there are none to compare."""
    pairs = [(before.get(key), gradient) for key, gradient in again.items()]
    known = [(own, gradient) for own, gradient in pairs if own is not None]
    return all(same_bits(own, gradient) for own, gradient in known) if known else None


def reproduce(
    models: Mapping[str, nn.Module],
    moment: StepSnapshot,
    taps: Any,
    sinks: Sequence[Any],
    run: str | None = None,
) -> Replayed:
    """Run the step of a moment again under taps; its record is of the phase ``replay``."""
    members = {name: _alone(model) for name, model in models.items()}
    holder: Any = members[""] if set(members) == {""} else members
    with untouched(*members.values()):
        with watch(holder, run, taps, sinks=sinks) as full, full.step(moment.step), full.phase("replay"):
            result = replay(moment.passes, members)
            for model in members.values():
                for parameter in model.parameters():
                    parameter.grad = result.gradients.get(id(parameter))  # to be read at the end of the block
    return result


def explain(
    models: Mapping[str, nn.Module], moment: StepSnapshot, on_birth: Callable[[Event], None] | None = None
) -> Birth | None:
    """Where the first bad value of a moment's step was born."""
    inner = {name: unwrap(model) for name, model in models.items()}
    search = Search(inner, on_birth)
    inputs = [copied((each.args, each.kwargs))[0] for each in moment.passes]
    for each, (args, kwargs) in zip(moment.passes, inputs, strict=True):
        search.name_inputs(each.model, args, kwargs)
        search.name_seeds(each.model, each.seeds)
    with untouched(*inner.values()), search.looking():
        result = replay(moment.passes, inner, inputs)
    search.look_at(tensor for output in result.outputs for tensor in output.values())
    search.look_at(result.gradients.values())
    return search.birth(moment.step)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors hold the same values, NaN being the same as NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    same = (left == right) | (left.isnan() & right.isnan())
    return bool(same.all())


def _compare(outcome: Outcome, written: Sequence[StepRecord], again: Sequence[StepRecord]) -> None:
    """Every number of the step against the replay's."""
    first, second = _numbers(written, outcome.step), _numbers(again, outcome.step)
    shared = [site for site in first if site in second]
    if shared:
        outcome.differing = [site for site in shared if first[site] != second[site]]
        outcome.reproduced = not outcome.differing


def _numbers(records: Sequence[StepRecord], step: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for block in _blocks(records, step):
        if "count" not in block.statistics:
            continue
        for row, site in enumerate(block.sites):
            if block.present is None or block.present[row]:
                values = block.values[row] + 0.0  # one zero, not two
                found[site] = np.where(np.isnan(values), np.nan, values).tobytes()
    return found


def _blocks(records: Sequence[StepRecord], step: int) -> list[ScalarBlock]:
    return [
        block
        for record in records
        if record.step == step and record.phase != "eval"
        for block in record.scalars
    ]


def _alone(model: nn.Module) -> nn.Module:
    """Without wrappers that talk to other ranks; a compiled model stays compiled."""
    return unwrap(model) if type(model).__name__ == "DistributedDataParallel" else model


class _Kept:
    """A writer that others must not close."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def write(self, record: StepRecord) -> None:
        self._writer.write(record)

    def event(self, kind: str, **facts: object) -> None:
        self._writer.event(kind, **facts)

    def close(self) -> None:
        self._writer.flush()


@final
@dataclass(slots=True)
class Offline:
    """What came of it."""

    step: int
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    birth: Birth | None = None
    error: Exception | None = None

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        return {
            "step": self.step,
            "compared": self.compared,
            "differing": self.differing,
            "birth": None if self.birth is None else self.birth.to_dict(),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }


def offline(
    run: str | os.PathLike[str],
    moment: StepSnapshot,
    models: Mapping[str, nn.Module],
    *,
    out: str | None = None,
    on_birth: Callable[[Event], None] | None = None,
) -> Offline:
    """Run a moment's step with these models; compare it with what the dump ``run`` holds of it."""
    if not moment.weights or not moment.passes:
        raise RunError(
            f"{run} keeps no weights or no call of the model for step {moment.step}: it holds the numbers of the last "
            f"steps only. {'; '.join(moment.notes)}"
        )
    moment.load_weights(models)
    with with_arithmetic(moment.arithmetic):
        return _replayed(run, moment, models, out, on_birth)


def _replayed(
    run: str | os.PathLike[str],
    moment: StepSnapshot,
    models: Mapping[str, nn.Module],
    out: str | None,
    on_birth: Callable[[Event], None] | None,
) -> Offline:
    note("looking for the first bad value")
    outcome = Offline(moment.step, birth=explain(models, moment, on_birth))
    note("running the step again")
    taps, sink = [tap(REPLAYED, Full()), tap(REPLAYED, Stats())], MemorySink()
    outcome.error = reproduce(models, moment, taps, [sink]).error
    if out is not None:  # by itself: a run's writer uses the memory of tensors again once they are on disk
        reproduce(models, moment, taps, [], run=out)
    recorded = open_run(run, partial=True)
    known = {
        ref.site
        for ref in recorded.tensors(phase="replay")
        if ref.step == moment.step and ref.field == "value"
    }
    for item in (item for record in sink.records for item in record.tensors if item.site in known):
        outcome.compared += 1
        if not same_bits(recorded.tensor(item.site, step=moment.step, phase="replay"), item.value):
            outcome.differing.append(item.site)
    return outcome
