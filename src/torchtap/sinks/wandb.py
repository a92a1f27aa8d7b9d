"""Send a training's numbers and histograms to Weights & Biases, one call for each step.

Without further words it writes offline, which needs no account; ``wandb sync`` uploads it later. Needs the extra
``wandb``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from torchtap.errors import needing
from torchtap.plan.sites import Selectable
from torchtap.sinks.choice import Choice
from torchtap.store.record import StepRecord

__all__ = ["WandbSink"]

_STEP = "torchtap/step"
_MOST_BINS = 512  # what wandb accepts


@final
class WandbSink:
    """Log into a run of its own, or into ``run``, which then stays open and keeps its own step.

    ``sites`` and ``statistics`` narrow down what is sent: some thousand numbers a step are more than the service is
    made for.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        sites: Selectable | Sequence[Selectable] | None = None,
        statistics: Sequence[str] | None = None,
        histograms: bool = True,
        mode: Literal["online", "offline", "disabled"] = "offline",
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        with needing("wandb", "wandb", who="WandbSink"):
            import wandb
        self._wandb: Any = wandb
        self._choice = Choice(sites, statistics)
        self._histograms = histograms
        self._own = run is None
        if run is None:
            place = None if folder is None else os.fspath(folder)
            run = wandb.init(project=project, mode=mode, dir=place, config=dict(config or {}))
        self._run: Any = run
        # our steps are their own axis, whatever else is logged into the same run and at whatever pace
        run.define_metric(_STEP)
        self._defined: set[str] = set()

    def name_by(self, label: Callable[[str, str, str], str]) -> None:
        """Name numbers by another function of site, statistic and phase. `ModuleMonitor` passes its own keys."""
        self._choice.name_by(label)

    def write(self, record: StepRecord) -> None:
        numbers: dict[str, object] = {**self._choice.by_name(record)}
        if self._histograms:
            for name, counts, edges in self._choice.histograms(record):
                if counts.value.numel() <= _MOST_BINS:
                    pair = (counts.value.numpy(), edges.value.numpy())
                    numbers[name] = self._wandb.Histogram(np_histogram=pair)
        if not numbers:
            return
        for group in {name.partition("/")[0] for name in numbers} - self._defined:
            self._run.define_metric(f"{group}/*", step_metric=_STEP)
            self._defined.add(group)
        self._run.log({_STEP: record.step, **numbers})

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """A finding, as an alert of wandb's, which takes a title of at most 64 characters."""
        kind = {"info": "INFO", "error": "ERROR"}.get(level, "WARN")
        where = "" if step is None else f" (step {step})"
        self._run.alert(title=title[:63], text=f"{title}{where}: {text}", level=kind)

    def close(self) -> None:
        self._choice.tell_what_never_came("WandbSink")
        if self._own:
            self._run.finish()
