"""Send a training's numbers, histograms and findings to Trackio, which keeps them in a local database.

Needs the extra ``trackio``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torchtap.errors import needing
from torchtap.plan.sites import Selectable
from torchtap.sinks.choice import Choice
from torchtap.store.record import StepRecord

__all__ = ["TrackioSink"]

_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


@final
class TrackioSink:
    """Log into a run of its own in ``project``, or into ``run``, which then stays open."""

    def __init__(
        self,
        project: str = "torchtap",
        *,
        name: str | None = None,
        run: object = None,
        sites: Selectable | Sequence[Selectable] | None = None,
        statistics: Sequence[str] | None = None,
        histograms: bool = True,
        config: Mapping[str, object] | None = None,
    ) -> None:
        with needing("trackio", "trackio", who="TrackioSink"):
            import trackio
        self._trackio: Any = trackio
        self._choice = Choice(sites, statistics)
        self._histograms = histograms
        self._own = run is None
        if run is None:
            # Its own measuring of the machine would start a thread beside the training.
            run = trackio.init(
                project=project,
                name=name,
                embed=False,
                config=dict(config or {}),
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self._run: Any = run

    def write(self, record: StepRecord) -> None:
        numbers: dict[str, object] = {**self._choice.by_name(record)}
        if self._histograms:
            for name, counts, edges in self._choice.histograms(record):
                pair = (counts.value.numpy(), edges.value.numpy())
                numbers[name] = self._trackio.Histogram(np_histogram=pair)
        if numbers:
            self._run.log(numbers, step=record.step)

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """A finding, as an alert of Trackio's."""
        kind = self._trackio.AlertLevel[_LEVELS.get(level, "WARN")]
        self._run.alert(title, text, level=kind, step=step)

    def close(self) -> None:
        self._choice.tell_what_never_came("TrackioSink")
        if self._own:
            self._run.finish()
