"""What an older torch cannot do by itself. Tests that need it are skipped there, with the reason.

The list is the table of docs/forms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.torch_version import TorchVersion

from torchtap._torch import TORCH_VERSION

DOCS = Path(__file__).parents[1] / "docs" / "forms.md"


@dataclass(frozen=True)
class Limit:
    """``since`` is the first torch without it."""

    since: str
    what: str
    instead: str

    @property
    def holds(self) -> bool:
        """Whether the torch that runs has this limit."""
        return TorchVersion(TORCH_VERSION) < self.since

    @property
    def skip(self) -> pytest.MarkDecorator:
        """Skips a test where the limit holds."""
        return pytest.mark.skipif(self.holds, reason=f"before torch {self.since}: {self.what}")


EXPORT_OF_KEPT_TENSORS = Limit(
    "2.10",
    "`torch.export` refuses a model whose outermost module keeps tensors on itself; a recurrent layer by itself is one",
    "put the model into another module, or use `torch.jit.trace`",
)
STRICT_EXPORT_OF_INSTRUMENTED = Limit(
    "2.10",
    "`torch.export` with `strict=True` refuses an instrumented model: hooks of the outermost module run outside of it",
    "leave `strict` out, or export the model without taps",
)
TRACE_OF_CHECKPOINTS = Limit(
    "2.12",
    "`torch.jit.trace` of a checkpoint is a trace that calls Python, which no tap can be put into",
    "trace the model without checkpoints, or export it",
)
INTERPRETED_TRITON = Limit(
    "2.12",
    "the interpreter of its Triton (3.6 or older) fails with numpy 2.4: the statistics' Triton kernel is not tried",
    "nothing to do: without a GPU the native kernel runs",
)
LIMITS = [EXPORT_OF_KEPT_TENSORS, STRICT_EXPORT_OF_INSTRUMENTED, TRACE_OF_CHECKPOINTS, INTERPRETED_TRITON]


def table() -> str:
    """The table of docs/forms.md."""
    rows = [f"| {limit.since} | {limit.what} | {limit.instead} |" for limit in LIMITS]
    return "\n".join(["| before torch | | instead |", "| --- | --- | --- |", *rows])
