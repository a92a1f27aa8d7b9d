"""Find the models that a script trains, from outside: the modules that own what its optimizers change.

An optimizer tells its parameters when it is made. The modules that own them, and the modules around those, are found
among all modules that are alive. The first call of one of them ends the search, and the models are handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from torchtap.integrations.first_call import FirstCall
from torchtap.integrations.models import called_models, held_by, roots_of

__all__ = ["Discovery"]

Found = Callable[[dict[str, nn.Module], list[Optimizer]], None]


@final
class Discovery:
    """Waits for the first call of a model that an optimizer of this process trains."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._first_call = FirstCall(self._on_call)
        original = self._original_init = Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._on_optimizer(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]

    def _on_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        for root in roots_of(held_by([optimizer])):
            self._first_call.wait_for(root)

    def _on_call(self, module: nn.Module) -> None:
        self.stop()
        optimizers = list(self._optimizers)
        self._found(called_models(module, roots_of(held_by(optimizers))), optimizers)

    def stop(self) -> None:
        """Take everything off again."""
        self._first_call.stop()
        Optimizer.__init__ = self._original_init  # type: ignore[method-assign]
