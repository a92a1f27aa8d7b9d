"""Base of the framework adapters: a watch that begins at the first call of the trained model.

Frameworks compile and wrap a model after they have passed it on, and some never call the object that holds it. So an
adapter names the modules and optimizers, and the watch is made at the first call, on the module that is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from torchtap import Tap, Watch, watch
from torchtap.diagnosis.pulse import Pulse, pulse_of
from torchtap.errors import SessionError
from torchtap.integrations.first_call import FirstCall
from torchtap.integrations.models import called_models, free_name, variable_name
from torchtap.plan.sites import Selectable
from torchtap.receive import training
from torchtap.receive.backward import UpdateLosses
from torchtap.sanitize import say

__all__ = ["DEFAULT_TAPS", "Accompanied", "Losses", "Taps"]

Taps: TypeAlias = "Tap | Selectable | Iterable[Tap | Selectable]"
DEFAULT_TAPS = ("*:output", "*:param", "*:param_grad")


@final
class Losses:
    """Log the losses of a training, by one rule for every way in.

    The loss of an update is the sum of what ``backward()`` was called on since the update before. ``loss`` is the sum
    over a step. ``loss.<optimizer>`` is that of one optimizer, if there are several. ``total=False``: the framework
    logs a ``loss`` of its own, and each optimizer has its ``loss.<optimizer>``.
    """

    def __init__(self, *, total: bool = True) -> None:
        self._total = total
        self._watch: Watch | None = None
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._process = os.getpid()
        self._losses = UpdateLosses(self._add, self._add_of_update)

    def listen(self) -> None:
        """Note losses from now on. Those before the watch begins are logged when it does."""
        self._losses.start()

    def begin(self, watch: Watch, optimizers: Iterable[Any]) -> None:
        """Log into a watch from now on."""
        self._watch = watch
        self.know(optimizers)
        self._losses.start()
        if self._losses.pending is not None:
            self._add(self._losses.pending)

    def know(self, optimizers: Iterable[Any]) -> list[Optimizer]:
        """Name these optimizers after the script's variables. Returns those that were not known."""
        found = [each for one in optimizers for each in training.innermost(one) if each not in self._names]
        for each in found:
            name = variable_name(each) or type(each).__name__
            self._names[each] = free_name(name, self._names.values())
        return found

    def _add(self, loss: Tensor) -> None:
        if self._total:
            self._log({"loss": loss})

    def _add_of_update(self, optimizer: Optimizer, loss: Tensor) -> None:
        name = self._names.get(optimizer)
        if name is not None and (len(self._names) > 1 or not self._total):
            self._log({f"loss.{name}": loss})

    def _log(self, numbers: dict[str, Tensor]) -> None:
        if self._watch is None or os.getpid() != self._process:
            return
        try:
            self._watch.add(numbers)
        except SessionError:  # it was closed
            self.stop()
        except Exception as error:
            self.stop()
            say(f"torchtap: the loss is not recorded: {error}")

    def write(self, record: object) -> None:
        """Take nothing: as a sink, it is closed with its watch."""

    def close(self) -> None:
        """Log no more: the watch is closed."""
        self.stop()

    def stop(self) -> None:
        """Log no more."""
        self._watch = None
        self._losses.stop()


@final
class Accompanied:
    """One training of a framework. ``watch`` is None until the model was called."""

    def __init__(
        self,
        run: str | os.PathLike[str] | None,
        taps: Taps,
        options: Mapping[str, Any],
        *,
        total: bool = True,
    ) -> None:
        self._run, self._taps, self._options = run, taps, dict(options)
        self._losses = Losses(total=total)
        self._first_call: FirstCall | None = None
        self._waiting: list[Callable[[Watch], None]] = []
        self._pulse: Pulse | None = None
        self.watch: Watch | None = None

    def begin(self, root: nn.Module, optimizers: Iterable[Any], start: int | None = None) -> None:
        """Watch ``root``, or the parts of it that are called, from its first call on."""
        followed = list(optimizers)

        def found(module: nn.Module) -> None:
            models = called_models(module, [_outermost(module, root)])
            model: Any = models[""] if set(models) == {""} else models
            made = watch(model, self._run, self._taps, **self._options)
            self.watch = made
            made.follow(*followed, start=start)
            self._losses.begin(made, followed)
            self._pulse = pulse_of(made, models)
            for action in self._waiting:
                action(made)
            self._waiting.clear()

        self._first_call = FirstCall(found)
        self._first_call.wait_for(root)

    def when_watching(self, action: Callable[[Watch], None]) -> None:
        """Do it now, or as soon as there is a watch."""
        if self.watch is not None:
            action(self.watch)
        else:
            self._waiting.append(action)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """The framework's own numbers; whatever is no number is left out."""
        kept = {name: value for name, value in numbers.items() if _is_number(value)}
        if self.watch is not None and kept:
            self.watch.log(kept)

    def close(self) -> None:
        """The training is over, or has failed."""
        if self._first_call is not None:
            self._first_call.stop()
        if self._pulse is not None:
            self._pulse.stop()
        self._losses.stop()
        made, self.watch = self.watch, None
        if made is not None:
            made.close()


def _outermost(called: nn.Module, root: nn.Module) -> nn.Module:
    """Return the called module if it wraps the root; the root otherwise."""
    return called if any(inner is root for inner in called.modules()) else root


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)
