"""Show a training in TensorBoard: numbers, histograms, attention maps and the model's graph.

All numbers of a step go into one event, which is many times cheaper than one call for each. Needs the extra
``tensorboard``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from torchtap.errors import needing
from torchtap.plan.sites import Selectable
from torchtap.sinks.choice import Choice, label, place_of
from torchtap.sinks.pictures import attention_picture
from torchtap.store.record import StepRecord, TensorItem

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardSink"]


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
