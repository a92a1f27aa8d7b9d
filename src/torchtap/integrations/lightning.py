"""Watch a training of Lightning: ``Trainer(..., callbacks=[TorchtapCallback("runs/exp1")])``; Fabric: `watch_fabric`.

Steps carry the trainer's ``global_step``; batches that are accumulated fold into one. Validation is the phase
``eval``; the sanity check before a training is not recorded. The loss and what the module logs are logged too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from torchtap import Watch, watch
from torchtap.integrations.accompany import DEFAULT_TAPS, Accompanied, Taps

__all__ = ["TorchtapCallback", "watch_fabric"]


class TorchtapCallback(Callback):  # type: ignore[misc]
    """Watches each fit of a trainer. ``options`` go to `torchtap.watch` (``every=``, ``sinks=``, ``labels=`` …).

    Without ``run`` the recording goes to ``torchtap`` in the trainer's log folder.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, taps: Taps = DEFAULT_TAPS, **options: Any
    ) -> None:
        self._run, self._taps, self._options = run, taps, options
        self._training: Accompanied | None = None
        self._of_training: set[str] = set()  # names of numbers that training steps log
        self._of_validation: set[str] = set()

    @property
    def watch(self) -> Watch | None:
        """The watch of the fit that is under way, once its model was called."""
        return None if self._training is None else self._training.watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        labels = {"trainer": "lightning", **self._options.get("labels", {})}
        place = (
            Path(trainer.log_dir or trainer.default_root_dir) / "torchtap" if self._run is None else self._run
        )
        self._training = Accompanied(place, self._taps, {**self._options, "labels": labels})
        self._training.begin(pl_module, trainer.optimizers, start=trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training is not None:
            epoch = trainer.current_epoch
            self._training.when_watching(lambda watch: watch.set_epoch(epoch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._training is None:
            return
        # Lightning keeps showing the numbers of the last validation: they are not of this step.
        logged = {k: v for k, v in trainer.logged_metrics.items() if k not in self._of_validation}
        self._of_training |= set(logged)
        self._training.log(logged)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training is not None and not trainer.sanity_checking:
            found = {k: v for k, v in trainer.callback_metrics.items() if k not in self._of_training}
            self._of_validation |= set(found)
            self._training.log(found)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.close()


def watch_fabric(
    model: nn.Module,
    optimizers: Any | Iterable[Any],
    run: str | os.PathLike[str] | None,
    taps: Taps = DEFAULT_TAPS,
    *,
    start: int | None = None,
    **options: Any,
) -> Watch:
    """Watch a model and follow the optimizers that ``fabric.setup`` gave back."""
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return watch(model, run, taps, **options).follow(*several, start=start)
