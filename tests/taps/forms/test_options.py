"""Every option in every form: it does what it does with the eager model, or it is refused (docs/forms.md).

A new option of ``tap``, ``capture`` or ``edit``, or a new reduction, fails a test here until it has a row.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchtap as tt
from torchtap.plan.tap import _one_tap
from torchtap.schedule.base import schedule_of

DOCS = Path(__file__).parents[3] / "docs" / "forms.md"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.b(h) + h


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


X = torch.linspace(-1, 1, 12).view(3, 4)


def _extra(model: nn.Module) -> Any:
    extra = tt.extra_outputs(model, "*:input", "*:output", args=(X,))
    return extra.wrap(torch.jit.trace(extra.module, X))


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, X),
    "FX": fx.symbolic_trace,
    "exported": lambda model: torch.export.export(model, (X,)).module(),
    "extra outputs": _extra,
}


def run(subject: Any, backward: bool = False) -> None:
    output = subject(X)
    if backward:
        output.square().sum().backward()


def looked(
    subject: Any, *taps: Any, backward: bool = False, calls: int = 1, **options: Any
) -> dict[str, Any]:
    with tt.capture(subject, *taps, **options) as seen:
        for _ in range(calls):
            run(subject, backward)
    return dict(seen)


def watched(subject: Any, *taps: Any, steps: int = 5) -> Any:
    sink = tt.MemorySink()
    watch = tt.watch(subject, None, list(taps), sinks=[sink])
    for _ in range(steps):
        with watch.step():
            run(subject)
    watch.close()
    return [
        (
            record.step,
            sorted(site for block in record.scalars for site in block.sites),
            sorted(t.site for t in record.tensors),
        )
        for record in sink.records
    ]


def evaluated(subject: Any) -> Any:
    sink = tt.MemorySink()
    watch = tt.watch(subject, None, [tt.tap("head:output", phase="named")], sinks=[sink])
    with watch.step():
        run(subject)
    with watch.step(), watch.phase("named"):
        run(subject)
    watch.close()
    return [(record.step, record.phase) for record in sink.records]


def from_thread(subject: Any) -> dict[str, Any]:
    with tt.capture(subject, "head:output", all_threads=True) as seen:
        thread = threading.Thread(target=run, args=(subject,))
        thread.start()
        thread.join()
    return dict(seen)


def failing(subject: Any) -> Any:
    def fail(value: Tensor) -> float:
        raise ValueError("on purpose")

    with tt.capture(subject, "head:output", keep=tt.Metric(fail), strict=False) as seen:
        run(subject)
    return len(seen.lost)


def edited(subject: Any) -> Any:
    with tt.edit(subject, {"inner.a:output": 0.0}) as edit:
        changed = subject(X)
    assert edit.applied == {"inner.a:output": 1}
    return {"changed": changed.detach()}


def twice(subject: Any) -> dict[str, Any]:
    """Two backwards of one forward: the gradients of both, folded by the reduction."""
    with tt.capture(subject, "head:grad_output", keep=tt.Stats()) as seen:
        output = subject(X)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    return {name: seen[name]["count"] for name in seen}


def kept(reduction: Any) -> Callable[[Any], Any]:
    return lambda subject: looked(subject, "head:output", "inner:input", keep=reduction)


# What an option does, seen from outside: the same in every form, or refused.
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "kind": lambda m: looked(m, tt.tap("head", tt.Full(), kind="input")),
    "exclude": lambda m: looked(m, tt.tap("*:output", tt.Full(), exclude="inner.**")),
    "alias": lambda m: (lambda seen: seen)(looked(m, tt.tap("head:output", tt.Full(), alias="logits"))),
    "budget": lambda m: watched(m, tt.tap("head:output", tt.Full(), budget=tt.Budget(bytes=30))),
    "per_consumer": lambda m: looked(
        m, tt.tap("inner.b:grad_input", tt.Full(), per_consumer=True), backward=True
    ),
    "every": lambda m: watched(m, tt.tap("head:output", every=2)),
    "offset": lambda m: watched(m, tt.tap("head:output", every=3, offset=1)),
    "steps": lambda m: watched(m, tt.tap("head:output", steps=[1, 4])),
    "epochs": lambda m: watched(m, tt.tap("head:output", epochs=[0])),
    "batches": lambda m: watched(m, tt.tap("head:output", batches=[0, 2])),
    "first": lambda m: watched(m, tt.tap("head:output", first=2)),
    "when": lambda m: watched(m, tt.tap("head:output", when=lambda moment: moment.step == 3)),
    "phase": evaluated,
    "merge": lambda m: looked(m, "head:output", calls=3, merge=True),
    "all_threads": from_thread,
    "strict": failing,
    "way": lambda m: looked(m, "head:output", way="wrap"),
    "like, inputs": lambda m: looked(m, "head:output", like=Model.of, inputs=(X,)),  # type: ignore[attr-defined]
    "keep=Stats()": kept(tt.Stats()),
    "keep=Full()": kept(tt.Full()),
    "keep=Full(copy=False)": kept(tt.Full(copy=False)),
    "keep=Histogram()": kept(tt.Histogram()),
    "keep=Sample()": kept(tt.Sample(4)),
    "keep=Quantiles()": kept(tt.Quantiles()),
    "keep=TopK()": kept(tt.TopK(2)),
    "keep=Units()": kept(tt.Units()),
    "keep=Gram()": kept(tt.Gram()),
    "keep=Entropy()": kept(tt.Entropy()),
    "keep=Metric()": kept(tt.Metric(torch.norm)),
    "several backwards": twice,
    "operators": lambda m: looked(m, "inner/relu:output"),
    "edit": edited,
}


@cache
def result(option: str, form: str) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    Model.of = model  # type: ignore[attr-defined]
    subject = FORMS[form](model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OPTIONS[option](subject)
    except tt.TorchtapError as error:
        return error


def is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.allclose(found.double(), expected.double(), atol=1e-6)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, float):
        return found == expected or abs(found - expected) <= 1e-5 * max(1, abs(expected))
    return bool(found == expected)


def state(option: str, form: str) -> str:
    found = result(option, form)
    if isinstance(found, tt.TorchtapError):
        return "refused"
    expected = result(option, "eager")
    if not found and expected:
        return "nothing, with a reason"
    return "yes" if is_same(found, expected) else "WRONG"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_honoured_or_refused(option: str, form: str) -> None:
    assert state(option, form) in ("yes", "refused", "nothing, with a reason"), (
        result(option, form),
        result(option, "eager"),
    )


def test_every_option_works_with_an_eager_model() -> None:
    assert [option for option in OPTIONS if isinstance(result(option, "eager"), tt.TorchtapError)] == []


def test_every_option_and_reduction_has_a_row() -> None:
    tap = {
        name
        for name, each in inspect.signature(_one_tap).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    capture = set(inspect.signature(tt.capture).parameters) - {"model", "taps", "keep"}
    rows = {name for row in OPTIONS for name in row.split(", ")}
    assert tap | set(schedule_of.__kwdefaults__ or ()) | capture <= rows
    reductions = {
        name
        for name in dir(tt)
        if isinstance(found := getattr(tt, name), type)
        and issubclass(found, tt.Reduction)
        and found is not tt.Reduction
    }
    assert {f"keep={name}()" for name in reductions} <= rows


def table() -> str:
    """The table of docs/forms.md."""
    lines = [f"| option | {' | '.join(FORMS)} |", "| --- " * (len(FORMS) + 1) + "|"]
    rows = ((option, [state(option, form) for form in FORMS]) for option in OPTIONS)
    return "\n".join([*lines, *(f"| `{option}` | {' | '.join(states)} |" for option, states in rows)])


def test_the_documentation_has_the_table() -> None:
    assert table() in DOCS.read_text(), f"put this into {DOCS.name}:\n{table()}"
