"""The recording of one process that runs an unchanged script: begun by `sitecustomize`, ended when the process ends.

It guarantees:
- nothing is made before a model that an optimizer trains is called, so that DataLoader workers, launchers and
  compile workers leave no trace;
- whatever goes wrong here costs the recording, never the script; it is told in one line on standard error;
- standard output, exit codes, signals and random numbers are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap.diagnosis.doctor import Doctor, doctor
from torchtap.errors import PlanError, RecordingLostError
from torchtap.integrations.zero_code.discovery import Discovery
from torchtap.integrations.zero_code.settings import DEFAULT_SITES, Settings
from torchtap.plan.next_live import Pace
from torchtap.plan.tap import Tap, tap
from torchtap.receive.losses import LossCatcher
from torchtap.reduce.registry import reduction_from_spec
from torchtap.session.front import watch
from torchtap.session.step_loss import StepLoss
from torchtap.session.watching import Watch
from torchtap.sinks.selection import make_sink

__all__ = ["TrainingRecording", "begin", "taps_of"]


def begin(words: str) -> TrainingRecording:
    """Wait in this process for a training, and record it as the words of ``TORCHTAP`` say."""
    return TrainingRecording(Settings.from_environment(words))


@final
class TrainingRecording:
    """A training that is being waited for, or recorded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watch: Watch | None = None
        self._open: Watch | Doctor | None = None  # what is to be closed
        self._process = os.getpid()
        self._failed = False
        self._folder = ""
        self._losses = LossCatcher(self._on_backward)
        self._loss = StepLoss()
        self._discovery = Discovery(self._on_found)
        atexit.register(self._at_exit)

    def _on_found(self, models: dict[str, nn.Module], optimizers: list[Optimizer]) -> None:
        if os.getpid() != self._process or torch.utils.data.get_worker_info() is not None:
            return  # a worker that was forked from the training's process
        try:
            self._start(models, optimizers)
        except Exception as error:
            self._give_up(error)
        # Who registers last is called first: the run's writer, which is loaded now, ends itself when the process does.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _start(self, models: dict[str, nn.Module], optimizers: list[Optimizer]) -> None:
        settings = self._settings
        if settings.model is not None:
            models = {"": named_model(settings.model)}
        model: Any = models[""] if set(models) == {""} else models
        self._folder = settings.folder()
        make_folder(self._folder)
        sinks = [make_sink(each) for each in settings.sinks]
        labels = {"command": " ".join(sys.argv), **settings.labels}
        if settings.doctor:
            self._open = doctor(
                model,
                *optimizers,
                run=self._folder,
                every=settings.every,
                share=settings.share,
                sinks=sinks,
                labels=labels,
            )
            return
        self._open = self._watch = watch(model, self._folder, taps_of(settings), sinks=sinks, labels=labels)
        self._watch.follow(*optimizers)
        self._losses.start()

    def _on_backward(self, loss: Tensor) -> None:
        if self._watch is None or os.getpid() != self._process:
            return
        try:
            self._loss.add(self._watch, loss)
        except Exception as error:
            self._losses.stop()
            _say(f"the loss is not recorded: {error}")

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._losses.stop()
        _say(f"this training is not recorded: {error}")

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        self._discovery.stop()
        self._losses.stop()
        if self._open is None:
            if not self._failed and _is_main_program():
                _say("no model was seen that an optimizer trains: nothing was recorded")
            return
        try:
            self._open.close()
            if int(os.environ.get("RANK", "0")) == 0:
                _say(closing_line(self._folder))
        except Exception as error:
            _say(f"the recording could not be ended: {error}")
        keep_the_exit_code_of_an_interrupt()


def taps_of(settings: Settings) -> list[Tap]:
    """The taps that the settings describe, or the default plan."""
    if not settings.tap:
        pace = Pace(settings.every, settings.share)
        return [tap(site, when=pace) for site in DEFAULT_SITES]
    taps = []
    for each in settings.tap:
        options: dict[str, Any] = {
            name: value for name, value in each.items() if name not in ("select", "keep")
        }
        keep = each.get("keep", "stats")
        spec: Mapping[str, Any] = {"reduction": keep} if isinstance(keep, str) else keep
        try:
            taps.append(tap(each["select"], reduction_from_spec(spec), **options))
        except TypeError as error:
            raise PlanError(f"tap {dict(each)!r}: {error}") from None
    return taps


def make_folder(folder: str) -> None:
    """Make the run folder, so that one which cannot be written is told once, before anything is recorded."""
    if "://" in folder:
        return  # a store elsewhere makes its own places
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise RecordingLostError(f"cannot begin a run in {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RecordingLostError(f"cannot begin a run in {folder}: the folder cannot be written")


def keep_the_exit_code_of_an_interrupt() -> None:
    """Let a script that Ctrl-C ended die of SIGINT, as it does without us.

    Python remembers that an interrupt ended the program, and forgets it when a string is executed afterwards. Modules
    that the end of a recording imports do this (every dataclass is made so). An interrupt that leaves a string sets
    it again, whether or not somebody catches it then.
    """
    if issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt", {})


def named_model(name: str) -> nn.Module:
    """The model that a variable of the script, or ``package.module:name``, holds."""
    try:
        holder: object = pkgutil.resolve_name(name if ":" in name else f"__main__:{name}")
    except (ImportError, AttributeError, ValueError):
        holder = None
    if not isinstance(holder, nn.Module):
        raise PlanError(f"--model {name!r} is no module of this script when the first model is called")
    return holder


def closing_line(folder: str) -> str:
    """Where the run is and what looks wrong in it."""
    from torchtap.diagnosis.run import diagnose
    from torchtap.store.read.reader import open_run

    run = open_run(folder)
    findings = [each for each in diagnose(run) if each.severity != "info"]
    wrong = "; ".join(str(each) for each in findings[:3]) or "nothing looks wrong"
    more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
    return f"{len(run.steps())} steps in {folder}: {wrong}{more}. Look: torchtap view {folder}"


def _is_main_program() -> bool:
    """Not a process that the program started for its own purposes."""
    import multiprocessing

    script = os.environ.get("TORCHTAP_SCRIPT")  # the process that `torchtap run` became, if that is a script
    if script is not None:
        return script == str(os.getpid())
    return multiprocessing.parent_process() is None and "RANK" not in os.environ and not _is_helper()


def _is_helper() -> bool:
    name = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") or ""
    return name.startswith(("torch.", "multiprocessing."))


def _say(line: str) -> None:
    print(f"torchtap: {line}", file=sys.stderr)
