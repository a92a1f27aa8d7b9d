"""`torchtap.compare_forms`: one model in several forms and precisions, each compared with the model as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from torchtap.comparison.front import compare
from torchtap.comparison.result import Comparison
from torchtap.comparison.table import number
from torchtap.errors import CompareError, TorchtapError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FormRow", "FormsComparison", "compare_forms"]


@final
@dataclass(frozen=True, slots=True)
class FormRow:
    """One form: its comparison with the model as it is, or why there is none."""

    form: str
    comparison: Comparison | None
    problem: str = ""

    @property
    def output_error(self) -> float | None:
        """The relative error of the model's own output; of a lower precision, from the model in its own."""
        if self.comparison is None:
            return None
        full = self.comparison.facts.get("from_full_precision", {})
        errors = [
            full.get(row.site, row.error)
            for row in self.comparison.rows
            if row.module == "" and row.kind == "output"
        ]
        return max(errors) if errors else None


@final
@dataclass(frozen=True, slots=True)
class FormsComparison:
    """Every form beside the model as it is."""

    rows: tuple[FormRow, ...]

    def __getitem__(self, form: str) -> FormRow:
        for row in self.rows:
            if row.form == form:
                return row
        raise KeyError(form)

    def __str__(self) -> str:
        return str(self.table())

    def table(self) -> Table:
        """One line for each form."""
        from rich.text import Text

        from torchtap.comparison.table import PrintedTable

        table = PrintedTable(title="forms against the model as it is")
        for heading in ("form", "sites", "output error", "first divergence", "verdict"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            result = row.comparison
            if result is None:
                table.add_row(row.form, "–", "–", "–", Text(row.problem), style="yellow")
                continue
            first = "–" if result.first is None else result.first.site
            style = {"same": "green", "differs": "red"}.get(result.outcome, "yellow")
            table.add_row(
                row.form,
                str(result.compared),
                number(row.output_error),
                first,
                Text(result.verdict),
                style=style,
            )
        return table


def compare_forms(
    model: nn.Module,
    inputs: object,
    forms: Sequence[str] = ("eager", "compile", "script", "export", "bf16", "int8"),
) -> FormsComparison:
    """Turn a model into each form, run it on ``inputs``, and compare it with the model as it is.

    ``inputs`` are a tuple of arguments or a mapping of keywords. A form that cannot be made, or does not run, has
    a line that says why.
    """
    unknown = [form for form in forms if form not in _FORMS]
    if unknown:
        raise CompareError(f"unknown forms {', '.join(unknown)}; known are {', '.join(_FORMS)}")
    return FormsComparison(tuple(_one(model, inputs, form) for form in forms))


def _one(model: nn.Module, inputs: object, form: str) -> FormRow:
    try:
        with torch.random.fork_rng(), torch.no_grad():
            changed = _FORMS[form](copy.deepcopy(model), inputs)
    except Exception as error:
        return FormRow(form, None, f"could not be made: {_brief(error)}")
    try:
        return FormRow(form, compare(model, changed, inputs=inputs))
    except TorchtapError as error:
        return FormRow(form, None, f"could not be compared: {_brief(error)}")


def _brief(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def _args(inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _compiled(model: nn.Module, inputs: object) -> object:
    return torch.compile(model)


def _scripted(model: nn.Module, inputs: object) -> object:
    return torch.jit.script(model)


def _traced(model: nn.Module, inputs: object) -> object:
    args, kwargs = _args(inputs)
    return torch.jit.trace(model, args, example_kwarg_inputs=kwargs or None, check_trace=False)


def _exported(model: nn.Module, inputs: object) -> object:
    args, kwargs = _args(inputs)
    return torch.export.export(model, args, kwargs).module()


def _in(dtype: torch.dtype) -> Callable[[nn.Module, object], object]:
    return lambda model, inputs: model.to(dtype)


def _int8(model: nn.Module, inputs: object) -> object:
    """Weights of linear layers rounded to eight bits for each output channel, the arithmetic as it was."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127.0
            module.weight.copy_((module.weight / scale).round().clamp(-127, 127) * scale)
    return model


_FORMS: dict[str, Callable[[nn.Module, object], object]] = {
    "eager": lambda model, inputs: model,
    "compile": _compiled,
    "script": _scripted,
    "trace": _traced,
    "export": _exported,
    "bf16": _in(torch.bfloat16),
    "fp16": _in(torch.float16),
    "fp64": _in(torch.float64),
    "int8": _int8,
}
