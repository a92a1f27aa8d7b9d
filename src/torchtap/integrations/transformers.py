"""Watch a training of Hugging Face's ``Trainer``: ``Trainer(..., callbacks=[TorchtapCallback("runs/exp1")])``.

Steps carry the Trainer's ``global_step`` (the first update is step 0), so a resumed training continues its numbers.
Micro-batches of one update fold together; evaluation is a phase of its own. What the Trainer logs is logged too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from torchtap import Watch
from torchtap.integrations.accompany import DEFAULT_TAPS, Accompanied, Taps

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["TorchtapCallback"]


class TorchtapCallback(TrainerCallback):  # type: ignore[misc]
    """Watches each training of a Trainer. ``options`` go to `torchtap.watch` (``every=``, ``sinks=``, ``labels=`` …).

    Without ``run`` the recording goes to ``torchtap`` in the Trainer's output folder.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, taps: Taps = DEFAULT_TAPS, **options: Any
    ) -> None:
        self._run, self._taps, self._options = run, taps, options
        self._training: Accompanied | None = None

    @property
    def watch(self) -> Watch | None:
        """The watch of the training that is under way, once its model was called."""
        return None if self._training is None else self._training.watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        self._close()
        labels = {"trainer": "transformers", **self._options.get("labels", {})}
        folder = Path(args.output_dir) / "torchtap" if self._run is None else self._run
        self._training = Accompanied(folder, self._taps, {**self._options, "labels": labels}, total=False)
        self._training.begin(known["model"], [known["optimizer"]], start=state.global_step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        if self._training is not None:
            epoch = int(state.epoch or 0)
            self._training.when_watching(lambda watch: watch.set_epoch(epoch))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **known: Any,
    ) -> None:
        if self._training is not None:
            self._training.log({name: value for name, value in (logs or {}).items() if name != "epoch"})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        self._close()

    def _close(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.close()
