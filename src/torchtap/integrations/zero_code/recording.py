"""The recording of one process that runs an unchanged script: begun by `sitecustomize`, ended when the process ends.

It guarantees:
- nothing is made before a model that an optimizer trains is called, so that DataLoader workers, launchers and
  compile workers leave no trace;
- whatever goes wrong here costs the recording, never the script; one line on standard error reports it;
- standard output, exit codes and random numbers are left alone. SIGTERM and ``os._exit`` end the process as ever, after
  what was recorded is on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from torchtap import Full, Run, Tap, Watch, capture, make_plan, tap, watch
from torchtap.diagnosis.doctor import DISK, Doctor, doctor
from torchtap.diagnosis.pulse import Pulse, pulse_of
from torchtap.errors import PlanError, RecordingLostError
from torchtap.integrations.accompany import Losses
from torchtap.integrations.models import free_name, held_by, variable_name
from torchtap.integrations.zero_code.discovery import Discovery
from torchtap.integrations.zero_code.settings import DEFAULT_SITES, Settings
from torchtap.plan.next_live import Pace
from torchtap.reduce.reduction import reduction_from_spec
from torchtap.sanitize import say
from torchtap.sinks.selection import make_sink
from torchtap.spi import Hooks, parameters_of

__all__ = ["TrainingRecording", "begin", "taps_of"]


def begin(words: str) -> TrainingRecording:
    """Wait in this process for a training, and record it as the words of ``TORCHTAP`` say."""
    return TrainingRecording(Settings.from_environment(words))


@final
class TrainingRecording:
    """Wait for the trainings of this process, and record them into one run, one after the other or together."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: Watch | Doctor | None = None
        self._pulse: Pulse | None = None
        self._process = os.getpid()
        self._failed = False
        self._folder = ""
        self._models: dict[str, nn.Module] = {}
        self._trainings = Trainings()
        self._losses = Losses()
        self._losses.listen()
        self._discovery = Discovery(self._on_found, self._is_recorded)
        self._leaving = LastWords(self._flush)
        atexit.register(self._at_exit)

    @property
    def _watch(self) -> Watch | None:
        return self._open.watch if isinstance(self._open, Doctor) else self._open

    def _is_ours(self) -> bool:
        """Return True in the process that trains, not in a worker that was forked from it."""
        return os.getpid() == self._process and torch.utils.data.get_worker_info() is None

    def _on_found(self, models: dict[str, nn.Module], optimizers: list[Optimizer]) -> None:
        if not self._is_ours():
            return
        try:
            self._start(models, optimizers)
        except Exception as error:
            self._give_up(error)
        # Who registers last is called first: the run's writer, which is loaded now, ends itself when the process does.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _is_recorded(self, optimizer: Optimizer) -> bool:
        """Follow a later optimizer if its parameters are recorded. Return False if they are not."""
        watch = self._watch
        if watch is None or not self._is_ours() or self._settings.model is not None:
            return True  # nothing can be done for it
        known = {id(each) for model in self._models.values() for each in model.parameters()}
        if not any(id(each) in known for each in parameters_of(optimizer)):
            return False
        if self._losses.know([optimizer]):
            watch.follow(optimizer)
            self._trainings.note(watch.updates)
            self._note_training(optimizer)
        return True

    def _note_training(self, optimizer: Optimizer) -> None:
        watch = self._watch
        if watch is not None:
            watch.note(
                "training",
                number=self._trainings.count,
                step=max(0, watch.step_number),
                optimizer=type(optimizer).__name__,
            )

    def _start(self, models: dict[str, nn.Module], optimizers: list[Optimizer]) -> None:
        settings = self._settings
        before = self._watch.updates if self._watch is not None else 0
        again = self._open is not None
        if self._open is not None:
            if self._pulse is not None:
                self._pulse.stop()
            self._open.close()  # the folder is continued after its steps
            self._open = self._pulse = None
            self._trainings.updates += before
            before = 0
            optimizers = _those_in_use(optimizers)
        if settings.model is not None:
            models = {"": named_model(settings.model)}
        elif again:
            models = self._also_these(models, optimizers)
        self._models = models
        model: Any = models[""] if set(models) == {""} else models
        if settings.dry_run:
            self._failed = True  # nothing will be recorded, as the user wants
            end_after_the_first_call(model, settings, optimizers)
            return
        self._folder = self._folder or settings.folder()
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
        else:
            disk = None if settings.tap else DISK  # a user's own plan is never thinned
            self._open = watch(
                model, self._folder, taps_of(settings), sinks=sinks, labels=labels, disk=disk
            ).follow(*optimizers)
            self._pulse = pulse_of(self._open, models)
            self._losses.begin(self._open, optimizers)
        self._losses.know(optimizers)
        self._trainings.note(before)
        if self._trainings.count > 1:
            self._note_training(optimizers[-1])

    def _also_these(self, models: dict[str, nn.Module], optimizers: list[Optimizer]) -> dict[str, nn.Module]:
        """Return the models that are trained now. One that has a name in the run keeps it; two models both have one."""
        held = held_by(optimizers)
        names = {id(model): name for name, model in self._models.items() if name}
        found: dict[str, nn.Module] = {}
        for name, model in models.items():
            if any(id(each) in held for each in model.parameters()):
                known = names.get(id(model))
                name = known or name or variable_name(model) or type(model).__name__
                found[free_name(name, {*found, *(() if known else self._models)})] = model
        if list(map(id, found.values())) == [id(self._models.get(""))]:
            return {"": self._models[""]}
        return found

    def _flush(self) -> None:
        """Write what there is: the process is about to end without Python's exit handlers."""
        watch = self._watch
        if watch is not None and os.getpid() == self._process:
            watch.flush()
            self._say_what_there_is(watch, whole=False)

    def _say_what_there_is(self, watch: Watch | None, *, whole: bool) -> None:
        updates = self._trainings.updates + (0 if watch is None else watch.updates)
        if int(os.environ.get("RANK", "0")) == 0:
            _say(closing_line(self._folder, self._trainings.count, updates, whole=whole))

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._losses.stop()
        self._discovery.stop()
        _say(f"this training is not recorded: {error}")

    def end(self) -> None:
        """End the recording before the process ends."""
        atexit.unregister(self._at_exit)
        self._at_exit()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        self._leaving.stop()
        self._discovery.stop()
        self._losses.stop()
        if self._open is None:
            if not self._failed and _is_main_program():
                _say("no model was seen that an optimizer trains: nothing was recorded")
            return
        try:
            watch = self._watch
            if self._pulse is not None:
                self._pulse.stop()
            self._open.close()
            self._say_what_there_is(watch, whole=True)
        except Exception as error:
            _say(f"the recording could not be ended: {error}")
        keep_the_exit_code_of_an_interrupt()


@final
class Trainings:
    """Count trainings: optimizers without an update in between belong to one."""

    def __init__(self) -> None:
        self.count = 0
        self.updates = 0  # of watches that are closed
        self._since = -1  # the updates when the newest training began

    def note(self, updates: int) -> None:
        """An optimizer has come after so many updates of the open watch."""
        if self.updates + updates > self._since:
            self.count += 1
            self._since = self.updates + updates


@final
class LastWords:
    """Call a function before SIGTERM or ``os._exit`` ends the process; both skip everything that Python does at exit.

    The exit code stays: the signal's own handling follows.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._exit = os._exit
        self._handler: Any = None

        @functools.wraps(os._exit)
        def leave(status: int) -> NoReturn:
            self._speak()
            self._exit(status)

        self._leave = leave
        os._exit = leave
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGTERM)
            if self._handler == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminated)

    def _speak(self) -> None:
        with contextlib.suppress(Exception):
            self._say()

    def _terminated(self, number: int, frame: object) -> None:
        self._speak()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def stop(self) -> None:
        """Remove everything from the process."""
        if os._exit is self._leave:
            os._exit = self._exit
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._terminated:  # `==`: it is a bound method
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


def end_after_the_first_call(model: Any, settings: Settings, optimizers: list[Optimizer]) -> None:
    """Let one call of the model run, print what a recording would cost, and end the script with code 0."""
    if settings.doctor:
        with doctor(model, *optimizers, quiet=True) as opened:
            plan = opened.watch.plan
    else:
        tree = nn.ModuleDict(model) if isinstance(model, dict) else model
        plan = make_plan(tree, taps_of(settings))
    looks, hooks = [], []
    for name, each in model.items() if isinstance(model, dict) else [("", model)]:
        look = capture(each, "*:output", "*:input", keep=Full(copy=False))
        looks.append((name, look, look.__enter__()))
        hooks.append(Hooks(each))

    def done(_: object) -> None:
        for hook in hooks:
            hook.remove()
        values = {
            f"{name}.{site}".lstrip("."): value for name, _, seen in looks for site, value in seen.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the models that were not called
            for _, look, _ in looks:
                look.__exit__(None, None, None)
        cost = plan.cost(values)
        often = (
            f"every {settings.every} steps or less often" if not settings.tap else "at the steps of the plan"
        )
        limit = (
            "" if settings.share is None or settings.tap else f", at most {settings.share:.0%} of the time"
        )
        _say(f"nothing was recorded. A recording writes {often}{limit};")
        for line in str(cost).splitlines():
            _say(line)
        raise SystemExit(0)

    for hook, (_, each) in zip(
        hooks, model.items() if isinstance(model, dict) else [("", model)], strict=True
    ):
        hook.after(each, done)


def make_folder(folder: str) -> None:
    """Make the run folder, so that one which cannot be written is reported once, before anything is recorded."""
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
    it again, caught or not.
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


def closing_line(folder: str, trainings: int = 1, updates: int = 0, *, whole: bool = True) -> str:
    """Return what was recorded, whether the audit passed, where the run is and what looks wrong in it.

    Not ``whole``: the process is being ended, and there is no time to judge.
    """
    from torchtap import open as open_run

    run = open_run(folder)
    audits: list[Any] = list(run.events("audit"))
    failed = [each for event in audits for each in event.get("failed", ())]
    audit = f"audit failed: {failed[0]}" if failed else "audit passed" if whole else "ended early"
    counts = (
        f"{_count(trainings, 'training')}, {_count(updates, 'update')}, {_count(len(run.steps()), 'step')}"
    )
    return (
        f"{counts}, {audit}, in {folder}{': ' + _judged(run) if whole else '. '}Look: torchtap view {folder}"
    )


def _judged(run: Run) -> str:
    from torchtap.diagnosis.diagnose import diagnose

    found = diagnose(run)
    findings = [each for each in found if each.severity != "info"]
    wrong = "; ".join(str(each) for each in findings[:3]) or found.summary()
    more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
    return f"{wrong}{more}. "


def _those_in_use(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that the script still holds. Those of a training that is over are often cycles."""
    known = [ref(each) for each in optimizers]
    optimizers.clear()
    gc.collect()
    return [each for one in known if (each := one()) is not None]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


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
    say(f"torchtap: {line}")
