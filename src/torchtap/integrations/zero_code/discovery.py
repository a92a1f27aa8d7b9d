"""Find the models that a script trains, from outside: the modules that own what its optimizers change.

An optimizer has its parameters when it is made. The modules that own them, and the modules around those, are found
among all modules that are alive. The first call of one of them, or the first update, hands the models over. Optimizers
that are made later are handed over as soon as their models are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from torchtap.integrations.first_call import FirstCall
from torchtap.integrations.models import called_models, held_by, loose_parameters, owned_of, roots_of
from torchtap.receive import training
from torchtap.spi import StepListener

__all__ = ["Discovery"]

Found = Callable[[dict[str, nn.Module], list[Optimizer]], None]


@final
class Discovery(StepListener):
    """Call ``found(models, optimizers)`` for each group of optimizers, when a model of theirs is first called.

    ``also(optimizer)`` is called first for a later optimizer; it returns True if its parameters are
    recorded already.
    """

    def __init__(self, found: Found, also: Callable[[Optimizer], bool] | None = None) -> None:
        self._found = found
        self._also = also
        self._started = self._stopped = False
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._owned = 0  # parameters that modules had when the newest optimizer was made
        self._first_call = FirstCall(self._on_call)
        self._originals = Optimizer.__init__, Optimizer.add_param_group
        init, add_param_group = self._originals

        @functools.wraps(init)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._on_optimizer(optimizer)

        @functools.wraps(add_param_group)
        def added(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            add_param_group(optimizer, *args, **kwargs)
            if optimizer in self._optimizers:
                self._on_optimizer(optimizer)

        Optimizer.__init__ = made  # type: ignore[method-assign, assignment]
        Optimizer.add_param_group = added  # type: ignore[method-assign, assignment]
        training.listen(self)

    def entered(self, optimizer: Optimizer) -> None:
        """An update begins. Its optimizer may be a copy, which no constructor made."""
        if optimizer not in self._optimizers:
            self._on_optimizer(optimizer)
        if not self._started or not self._is_known(optimizer):
            self._hand_over(None)

    def _is_known(self, optimizer: Optimizer) -> bool:
        return self._also is None or self._also(optimizer)

    def _on_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        if self._started and self._is_known(optimizer):
            return
        if self._started:
            self._first_call.stop()
            self._first_call = FirstCall(self._on_call)
        held = held_by([optimizer])
        self._owned = len(owned_of(held_by(self._optimizers)))
        for root in roots_of(held):
            self._first_call.wait_for(root)

    def _on_call(self, module: nn.Module) -> None:
        held = held_by(self._optimizers)
        if len(owned_of(held)) < self._owned:
            self._first_call.stop()  # `functional_call` has put others in their place: the update will tell
        else:
            self._hand_over(module)

    def _hand_over(self, called: nn.Module | None) -> None:
        self._first_call.stop()
        if self._stopped:
            return
        self._started = True
        optimizers = list(self._optimizers)
        held = held_by(optimizers)
        models = called_models(called, roots_of(held)) | loose_parameters(optimizers)
        if self._also is None:
            self.stop()
        if models:
            self._found(models, optimizers)

    def stop(self) -> None:
        """Restore torch."""
        self._stopped = True
        self._first_call.stop()
        training.stop_listening(self)
        Optimizer.__init__, Optimizer.add_param_group = self._originals  # type: ignore[method-assign]
