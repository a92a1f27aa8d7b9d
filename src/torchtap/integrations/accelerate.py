"""Watch what an ``Accelerator`` has prepared: ``watch = watch_prepared(accelerator, "runs/exp1")`` after ``prepare``.

A step is what really changes the weights: batches under ``accelerator.accumulate`` fold into one.
`TorchtapTracker` brings what ``accelerator.log`` is given into the same run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from torchtap import Watch, watch
from torchtap.errors import SessionError
from torchtap.integrations.accompany import DEFAULT_TAPS, Losses, Taps

__all__ = ["TorchtapTracker", "watch_prepared"]


def watch_prepared(
    accelerator: Accelerator,
    run: str | os.PathLike[str] | None,
    taps: Taps = DEFAULT_TAPS,
    *,
    start: int | None = None,
    **options: Any,
) -> Watch:
    """Watch the models that an accelerator has prepared, and follow its optimizers."""
    models, optimizers = accelerator._models, accelerator._optimizers
    if not models or not optimizers:
        raise SessionError(
            f"the accelerator has prepared {len(models)} models and {len(optimizers)} optimizers: call "
            "accelerator.prepare(model, optimizer, …) first"
        )
    named: Any = models[0] if len(models) == 1 else {f"model{n}": one for n, one in enumerate(models)}
    losses = Losses(total=False)
    options["sinks"] = [*options.get("sinks", ()), losses]  # it stops when the watch is closed
    made = watch(named, run, taps, **options).follow(*optimizers, start=start)
    losses.begin(made, optimizers)
    return made


class TorchtapTracker(GeneralTracker):  # type: ignore[misc]
    """Logs what ``accelerator.log`` is given into a watch: ``Accelerator(log_with=TorchtapTracker())``.

    Hand it the watch with ``attach``; until then numbers are dropped, because no step exists to which they belong.
    """

    name = "torchtap"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self._watch: Watch | None = None

    def attach(self, watch: Watch) -> Watch:
        """Log into this watch from now on."""
        self._watch = watch
        return watch

    @property
    def tracker(self) -> Watch | None:
        """The watch."""
        return self._watch

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Hyperparameters belong into the run's labels, which `watch_prepared` takes."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log the numbers among the values."""
        numbers = {name: each for name, each in values.items() if isinstance(each, (int, float))}
        if self._watch is not None and numbers:
            self._watch.log(numbers)

    def finish(self) -> None:
        """The training is over."""
        if self._watch is not None:
            self._watch.close()
