"""Send a training's numbers to MLflow: one batch for each step, and findings as notes of the run.

MLflow's own default is a SQLite file in the working folder, so nothing here needs a server. A metric's name keeps to
MLflow's alphabet: other characters become ``_``, and ``#`` of a repeated call becomes ``.call``. Needs the extra
``mlflow``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from torchtap.errors import needing
from torchtap.plan.sites import Selectable
from torchtap.sinks.choice import Choice
from torchtap.store.record import StepRecord

__all__ = ["MlflowSink"]

_MOST_AT_ONCE = 1000  # what one `log_batch` accepts
_FOREIGN = re.compile(r"[^\w\-./ :]")
_LONGEST_NAME = 250


@final
class MlflowSink:
    """Log into a run of its own in ``experiment``, or into ``run_id``, which then stays open.

    ``tracking_uri`` is MLflow's own (``sqlite:///mlflow.db``, a server …); None takes what MLflow is set to.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        sites: Selectable | Sequence[Selectable] | None = None,
        statistics: Sequence[str] | None = None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        with needing("mlflow", "mlflow", who="MlflowSink"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri)
        self._choice = Choice(sites, statistics)
        self._own = run_id is None
        self.run_id: str = self._begin_run(experiment) if run_id is None else run_id
        self._alerts = 0
        for name, value in (params or {}).items():
            self._client.log_param(self.run_id, name, value)

    def _begin_run(self, experiment: str | None) -> str:
        known = None if experiment is None else self._client.get_experiment_by_name(experiment)
        if experiment is None:
            identity = "0"  # MLflow's default experiment
        else:
            identity = (
                known.experiment_id if known is not None else self._client.create_experiment(experiment)
            )
        run_id: str = self._client.create_run(identity).info.run_id
        return run_id

    def write(self, record: StepRecord) -> None:
        milliseconds = int(record.time * 1000)
        metrics = [
            self._metric(mlflow_name(name), value, milliseconds, record.step)
            for name, value in self._choice.by_name(record).items()
        ]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_AT_ONCE])

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """A finding, as a tag of the run: MLflow has no alerts, and tags are shown first."""
        where = "" if step is None else f" (step {step})"
        self._client.set_tag(
            self.run_id, f"torchtap.alert.{self._alerts}", f"{level}: {title}{where}: {text}"
        )
        self._alerts += 1

    def close(self) -> None:
        self._choice.tell_what_never_came("MlflowSink")
        if self._own:
            self._client.set_terminated(self.run_id)


def mlflow_name(name: str) -> str:
    """A metric's name in MLflow's alphabet, no longer than MLflow takes."""
    return _FOREIGN.sub("_", name.replace("#", ".call"))[:_LONGEST_NAME]
