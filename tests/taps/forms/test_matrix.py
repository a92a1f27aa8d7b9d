"""Form by structure by kind: the same sites and the same values as the eager model, or a reason why not.

`REFUSALS` is the whole list of what cannot work. The table in docs/forms.md is checked against it.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.taps.forms.making import FORMS
from tests.taps.forms.structures import STRUCTURES
from torch import Tensor, nn

import torchtap as tt
from torchtap.plan.sites import Site

KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer")
DOCS = Path(__file__).parents[3] / "docs" / "forms.md"

# Why a form has no values of a kind.
NO_AUTOGRAD = "autograd does not run through it"
NO_PARAMETERS = "its parameters are constants of the graph"
REFUSALS: dict[tuple[str, str], str] = {
    ("freeze", "grad_input"): NO_AUTOGRAD,
    ("freeze", "grad_output"): NO_AUTOGRAD,
    ("freeze", "param"): NO_PARAMETERS,
    ("freeze", "param_grad"): NO_PARAMETERS,
    ("freeze", "buffer"): NO_PARAMETERS,
    **{
        (form, kind): reason
        for form in ("extra outputs, traced", "extra outputs, exported")
        for kind, reason in (
            ("grad_input", NO_AUTOGRAD),
            ("grad_output", NO_AUTOGRAD),
            ("param", "read it from the model"),
            ("param_grad", "read it from the model"),
            ("buffer", "read it from the model"),
        )
    },
}
# Forms that know tensors but not the structure a forward returned them in: leaves are numbered as they were made.
NUMBERED = {"trace", "FX", "FX, transformed", "export", "export, only loaded"}
STRUCTURED = ("tuple", "namedtuple", "list", "dict", "nested", "keywords")
# Forms that are for inference, or whose backward torch itself cannot run with batch normalisation in training.
EVALUATED = ("freeze", "export, decomposed")
# Forms whose compiler does other arithmetic.
CLOSE = ("freeze",)
# Freezing multiplies the normalisation into the layer before it: these values are no longer computed.
FOLDED = {"freeze": ("made.linear:output", "made.norm:input")}


@cache
def eager(structure: str, training: bool) -> dict[str, Tensor]:
    return captured("eager", structure, training)


@cache
def captured(form: str, structure: str, training: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = STRUCTURES[structure]().train(training)
    x = torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    subject = FORMS[form](model, x)
    if isinstance(subject, nn.Module) and training:
        subject.load_state_dict(before, strict=False)  # a trace has run the model, and so moved its averages
    kinds = [kind for kind in KINDS if (form, kind) not in REFUSALS]
    if structure != "tensor" and "buffer" in kinds:
        kinds.remove("buffer")  # only that model has any
    given = torch.randn(3, 4, requires_grad=True)
    with tt.capture(subject, *(f"*:{kind}" for kind in kinds)) as seen:
        output = subject(given)
        if "grad_output" in kinds:
            output.square().sum().backward()
    return dict(seen)


def numbered(sites: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Values by port, whatever their leaves are called."""
    found: dict[str, list[Tensor]] = {}
    for name, value in sites.items():
        site = Site.parse(name)
        found.setdefault(f"{site.path}:{site.kind}#{site.call}", []).append(value)
    return found


def combinations() -> list[Any]:
    return [
        pytest.param(form, structure, kind, id=f"{form}-{structure}-{kind}")
        for form in FORMS
        for structure in STRUCTURES
        for kind in KINDS
        if (form, kind) not in REFUSALS and form != "eager" and (kind != "buffer" or structure == "tensor")
    ]


@pytest.mark.parametrize(("form", "structure", "kind"), combinations())
def test_a_form_gives_the_sites_and_values_of_the_eager_model(form: str, structure: str, kind: str) -> None:
    training = form not in EVALUATED
    wanted = {
        name: value for name, value in eager(structure, training).items() if Site.parse(name).kind == kind
    }
    found = {n: v for n, v in captured(form, structure, training).items() if Site.parse(n).kind == kind}
    assert wanted
    if form in NUMBERED and structure in STRUCTURED:
        by_port, expected = numbered(found), numbered(wanted)
        assert by_port.keys() == expected.keys()
        for port, values in expected.items():
            for value in values:
                assert any(torch.equal(value, other) for other in by_port[port]), port
        return
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if structure == "tensor" and name in FOLDED.get(form, ()):
            continue
        if form in CLOSE:
            torch.testing.assert_close(found[name], value)
        else:
            assert torch.equal(found[name], value), name


def table() -> str:
    """The table of docs/forms.md, as the tests have it."""
    rows = [
        "| form | " + " | ".join(KINDS) + " | leaves of a structure | values |",
        "| --- " * (len(KINDS) + 3) + "|",
    ]
    reasons: list[str] = []
    for form in FORMS:
        cells = []
        for kind in KINDS:
            reason = REFUSALS.get((form, kind))
            if reason is None:
                cells.append("yes")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})")
        names = "numbered" if form in NUMBERED else "named"
        rows.append(f"| {form} | {' | '.join(cells)} | {names} | {'close' if form in CLOSE else 'equal'} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*rows, "", *notes])


def test_the_documentation_has_the_table_that_the_tests_hold() -> None:
    assert table() in DOCS.read_text(), f"put this into {DOCS.name}:\n{table()}"


def test_at_least_150_combinations_run() -> None:
    assert len(combinations()) >= 150
