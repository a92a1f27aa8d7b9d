"""Send numbers, histograms, attention maps and findings to TensorBoard, Weights & Biases, MLflow and Trackio.

Each tracker is imported when its sink is made. A failing tracker costs its own values and never the training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import needing
from torchtap.plan.sites import Selectable
from torchtap.sinks.selection import Choice, label, place_of
from torchtap.spi import StepRecord, TensorItem

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MlflowSink", "TensorBoardSink", "TrackioSink", "WandbSink", "attention_picture"]


_LARGEST = 256  # pixels of one head's map; a longer sequence is thinned


def attention_picture(maps: Tensor) -> npt.NDArray[np.uint8] | None:
    """(…, heads, queries, keys) → a picture, each head from black (0) to white (its largest); None if not maps."""
    if maps.ndim < 2 or maps.numel() == 0 or maps.is_complex():
        return None
    while maps.ndim > 3:
        maps = maps[0]
    if maps.ndim == 2:
        maps = maps[None]
    rows, columns = (-(-size // _LARGEST) for size in maps.shape[-2:])
    thin = np.nan_to_num(maps[:, ::rows, ::columns].float().numpy())
    heads, height, width = thin.shape
    across = int(np.ceil(np.sqrt(heads)))
    down = -(-heads // across)
    picture = np.zeros((down * (height + 1) - 1, across * (width + 1) - 1), np.uint8)
    for head in range(heads):
        top, left = head // across * (height + 1), head % across * (width + 1)
        largest = max(float(thin[head].max()), 1e-12)
        shades = np.clip(thin[head] / largest, 0, 1) * 255
        picture[top : top + height, left : left + width] = shades.astype(np.uint8)
    return picture


@final
class TensorBoardSink:
    """Write TensorBoard's event files; ``sites`` and ``statistics`` narrow down what is shown.

    ``place`` is a folder, or a ``SummaryWriter`` that the training has already: its own numbers and these are then in
    one place, and closing it is left to the training.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | SummaryWriter,
        *,
        sites: Selectable | Sequence[Selectable] | None = None,
        statistics: Sequence[str] | None = None,
        images: bool = True,
    ) -> None:
        with needing("tensorboard", "tensorboard", who="TensorBoardSink"):
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        self._summary: Any = Summary
        self._choice = Choice(sites, statistics)
        self._images = images
        self._given = isinstance(place, SummaryWriter)
        self._writer: Any = place if isinstance(place, SummaryWriter) else SummaryWriter(os.fspath(place))

    def name_by(self, label: Callable[[str, str, str], str]) -> None:
        """Name numbers by another function of site, statistic and phase. `ModuleMonitor` passes its own keys."""
        self._choice.name_by(label)

    def write(self, record: StepRecord) -> None:
        summary = self._summary()
        for name, value in self._choice.by_name(record).items():
            summary.value.add(tag=name, simple_value=value)
        if summary.value:
            self._writer.file_writer.add_summary(summary, record.step, record.time)
        for name, counts, edges in self._choice.histograms(record):
            self._add_histogram(name, counts, edges, record)
        if self._images:
            for item in self._choice.tensors(record):
                if item.reduction == "full" and place_of(item.site)[0] == "attention":
                    picture = attention_picture(item.value)
                    if picture is not None:
                        name = label(item.site, "map")
                        self._writer.add_image(name, picture, record.step, record.time, dataformats="HW")

    def _add_histogram(self, name: str, counts: TensorItem, edges: TensorItem, record: StepRecord) -> None:
        count = counts.value.double().numpy()
        edge = edges.value.double().numpy()
        filled = np.flatnonzero(count)
        if not len(filled):
            return
        first, last = filled[0], filled[-1] + 1
        count, edge = count[first:last], edge[first : last + 1]
        middle = (edge[:-1] + edge[1:]) / 2  # all that is known of where in its bin a value lies
        self._writer.add_histogram_raw(
            name,
            min=float(edge[0]),
            max=float(edge[-1]),
            num=int(count.sum()),
            sum=float((count * middle).sum()),
            sum_squares=float((count * middle**2).sum()),
            # each bucket is named by its right end; the first, empty one marks the start of the second
            bucket_limits=edge.tolist(),
            bucket_counts=[0.0, *count.tolist()],
            global_step=record.step,
            walltime=record.time,
        )

    def add_graph(self, model: nn.Module, inputs: Tensor | Sequence[Tensor]) -> None:
        """Show the model's graph, traced with these inputs."""
        self._writer.add_graph(model, inputs)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._choice.tell_what_never_came("TensorBoardSink")
        if self._given:
            self._writer.flush()
        else:
            self._writer.close()


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
