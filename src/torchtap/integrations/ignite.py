"""Watch a training of Ignite: ``TorchtapHandler(model, optimizer, "runs/exp1").attach(trainer)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, final

from ignite.engine import Engine, Events
from torch import Tensor, nn

from torchtap import Watch, watch
from torchtap.errors import SessionError
from torchtap.integrations.accompany import DEFAULT_TAPS, Losses, Taps

__all__ = ["TorchtapHandler"]


@final
class TorchtapHandler:
    """Follows the optimizers; epochs are the engine's, phases are the evaluators' names."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Any,
        run: str | os.PathLike[str] | None,
        taps: Taps = DEFAULT_TAPS,
        **options: Any,
    ) -> None:
        self._model, self._run, self._taps, self._options = model, run, taps, options
        self._optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._phase: Any = None
        self._losses = Losses(total=False)
        self.watch: Watch | None = None

    def attach(self, trainer: Engine, evaluators: Mapping[str, Engine] | None = None) -> TorchtapHandler:
        """Watch from the trainer's start to its end."""
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._log_output)
        trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, self._close)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._fail)
        for name, evaluator in (evaluators or {}).items():
            if evaluator is trainer:
                raise SessionError(f"the evaluator {name!r} is the trainer itself")
            evaluator.add_event_handler(Events.STARTED, self._begin_phase, name)
            evaluator.add_event_handler(Events.COMPLETED, self._end_phase, name)
            evaluator.add_event_handler(Events.EXCEPTION_RAISED, self._fail_phase)
        return self

    def _start(self, trainer: Engine) -> None:
        done = trainer.state.iteration
        self.watch = watch(self._model, self._run, self._taps, **self._options)
        self.watch.follow(*self._optimizers, start=done or None)
        self._losses.begin(self.watch, self._optimizers)

    def _begin_epoch(self, trainer: Engine) -> None:
        if self.watch is not None:
            self.watch.set_epoch(trainer.state.epoch - 1)  # Ignite counts from 1

    def _log_output(self, trainer: Engine) -> None:
        output = trainer.state.output
        if self.watch is None:
            return
        if isinstance(output, (int, float)) or (isinstance(output, Tensor) and output.numel() == 1):
            self.watch.log(loss=output)
        elif isinstance(output, Mapping):
            self.watch.log({name: each for name, each in output.items() if isinstance(each, (int, float))})

    def _begin_phase(self, evaluator: Engine, name: str) -> None:
        if self.watch is not None:
            self._phase = self.watch.phase(name)
            self._phase.__enter__()

    def _end_phase(self, evaluator: Engine, name: str) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)
            if self.watch is not None:
                metrics: Mapping[str, Any] = evaluator.state.metrics
                self.watch.log(
                    {f"{name}/{key}": each for key, each in metrics.items() if isinstance(each, float)}
                )

    def _fail_phase(self, evaluator: Engine, error: BaseException) -> None:
        """End the phase of an evaluation that failed."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)
        raise error

    def _fail(self, trainer: Engine, error: BaseException) -> None:
        """Raise again: Ignite treats an exception that reached a handler as handled."""
        self._close()
        raise error

    def _close(self, *_: Any) -> None:
        self._losses.stop()
        made, self.watch = self.watch, None
        if made is not None:
            made.close()
