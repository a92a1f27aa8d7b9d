"""Real architectures through every form that accepts them: the sites and values of the eager model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tests.models import CASES, Case, make
from tests.taps.forms.making import saved_program, saved_script
from torch import fx

import torchtap as tt
from torchtap.plan.sites import Site


def instrumented(case: Case) -> Any:
    return tt.instrument(case.model, "*:output")


def exported(case: Case) -> Any:
    return torch.export.export(case.model, case.args, case.kwargs).module()


FORMS = {
    "compiled": lambda case: torch.compile(case.model, backend="eager"),
    "exported": exported,
    "exported, instrumented": lambda case: saved_program(
        torch.export.export(instrumented(case), case.args, case.kwargs)
    ).module(),
    "scripted": lambda case: saved_script(torch.jit.script(case.model)),
    "fx": lambda case: fx.symbolic_trace(case.model),
    "pickled": lambda case: pickle.loads(pickle.dumps(instrumented(case))),
}
# Hugging Face models are not scriptable, and FX takes them only with transformers' own tracer.
ACCEPTED = {
    "compiled": tuple(CASES),
    "exported": ("mlp", "cnn", "lstm", "gpt", "structured", "thrice", "bert", "gpt2", "llama", "vit"),
    "exported, instrumented": (
        "mlp", "cnn", "lstm", "transformer", "gpt", "structured", "thrice", "bert", "gpt2", "llama", "vit",
    ),
    "scripted": ("mlp", "cnn", "lstm", "transformer", "thrice"),
    "fx": ("mlp", "cnn", "lstm", "thrice"),
    "pickled": ("mlp", "cnn", "lstm", "transformer", "gpt", "structured", "thrice"),
}  # fmt: skip
# From the marks of an exported program alone: leaves of structures are numbered and what nobody uses is gone.
BY_MARKS = {"exported", "fx"}


@pytest.mark.parametrize(("form", "name"), [(form, name) for form in FORMS for name in ACCEPTED[form]])
def test_a_form_of_a_real_model_gives_the_eager_sites_and_values(form: str, name: str) -> None:
    case = make(name)
    case.model.eval()
    # With autograd on: without, nn.Transformer takes a fast path that calls none of its modules.
    with tt.capture(case.model, "*:output") as eager:
        case.model(*case.args, **case.kwargs)
    subject = FORMS[form](case)
    with tt.capture(subject, "*:output") as seen:
        subject(*case.args, **case.kwargs)
    if form not in BY_MARKS:
        assert set(seen) == set(eager)
    assert len(seen) >= len(eager) // 2
    for site in seen:
        if site in eager:
            torch.testing.assert_close(seen[site], eager[site], msg=f"{name} {form} {site}")
        else:
            parsed = Site.parse(site)
            values = [
                v
                for n, v in eager.items()
                if (s := Site.parse(n)).path == parsed.path and s.call == parsed.call
            ]
            assert any(
                v.shape == seen[site].shape and torch.allclose(v, seen[site], atol=1e-5) for v in values
            ), site


def test_gradients_of_a_hugging_face_model_come_out_of_the_compiled_graph() -> None:
    case = make("gpt2")
    with tt.capture(case.model, "*:grad_output") as eager:
        case.loss().backward()
    compiled = torch.compile(case.model, backend="aot_eager")
    with tt.capture(compiled, "*:grad_output") as seen:
        Case(compiled, case.args, case.kwargs).loss().backward()
    assert set(seen) >= set(eager)
    for site in eager:
        torch.testing.assert_close(seen[site], eager[site])
