"""What all framework adapters share: a watch that begins at the first call of the model which a framework trains.

Frameworks compile and wrap a model after they have told of it, and some never call the object that holds it. So an
adapter says which modules and optimizers there are, and the watch is made when the first call shows what is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from torchtap import Tap, Watch, watch
from torchtap.integrations.first_call import FirstCall
from torchtap.integrations.models import called_models
from torchtap.plan.sites import Selectable
from torchtap.session.pulse import Pulse, pulse_of

__all__ = ["DEFAULT_TAPS", "Accompanied", "Taps"]

Taps: TypeAlias = "Tap | Selectable | Iterable[Tap | Selectable]"
DEFAULT_TAPS = ("*:output", "*:param", "*:param_grad")


@final
class Accompanied:
    """One training of a framework. ``watch`` is None until the model was called."""

    def __init__(self, run: str | os.PathLike[str] | None, taps: Taps, options: Mapping[str, Any]) -> None:
        self._run, self._taps, self._options = run, taps, dict(options)
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
        made, self.watch = self.watch, None
        if made is not None:
            made.close()


def _outermost(called: nn.Module, root: nn.Module) -> nn.Module:
    """What is called, if it wraps the root; the root otherwise."""
    return called if any(inner is root for inner in called.modules()) else root


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)
