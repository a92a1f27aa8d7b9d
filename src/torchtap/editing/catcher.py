"""Run a model only as far as one place and keep what arrives there, as calibration does with a model's first block.

    with Catcher(model, "blocks.0:input") as caught:
        for batch in loader:
            model(batch)                     # stops at blocks.0 and returns None
    for args, kwargs in caught.calls:
        model.blocks[0](*args, **kwargs)

Without a site it is a module that stands in a layer's place (`layer_catcher`). It guarantees:
- nothing after the place is run, and the model raises nothing for it;
- what is kept is a detached copy in the structure that it had: positions, keywords, tuples and dicts;
- leaving the block restores the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self, final, overload

from torch import Tensor, nn

from torchtap import Selector, Stats, Tap, make_plan
from torchtap.editing.eager_only import hookable, running_eagerly
from torchtap.editing.layer_catcher import CallArguments, LayerCatcher
from torchtap.errors import PlanError
from torchtap.hooks.leaves import Args, Kwargs
from torchtap.hooks.replace import replace_forward
from torchtap.plan.sites import Selectable
from torchtap.spi import Call, Stop, Visiting, map_leaves

__all__ = ["CallArguments", "Catcher"]


class _Caught(BaseException):
    """Goes from the place up to the model. Not an Exception, so that a model's own handlers let it pass."""

    def __init__(self, catcher: Catcher) -> None:
        super().__init__("a torchtap.Catcher has what it wants")
        self.catcher = catcher


@final
class Catcher:
    """Stops a model's forward at a site of kind input or output, and keeps what arrives there.

    stop: whether the forward ends there; without it the model continues. limit: keep so many calls, then let all
    further ones pass. keep: what is done to each tensor, by default ``tensor.detach().clone()``.

    ``Catcher(layer)``, without a site, is a module to stand in the layer's place: `LayerCatcher`.
    """

    @overload
    def __new__(cls, model: object, site: Selectable, **options: object) -> Catcher: ...
    @overload
    def __new__(cls, model: nn.Module, site: None = None, **options: object) -> LayerCatcher: ...  # type: ignore[misc]
    def __new__(cls, model: Any, site: Selectable | None = None, **options: Any) -> Any:
        if site is not None:
            return super().__new__(cls)
        if not isinstance(model, nn.Module):
            raise PlanError(f"Catcher({model!r}): without a site it takes the layer that it stands in for")
        return LayerCatcher(model, **options)

    def __init__(
        self,
        model: Any,
        site: Selectable,
        *,
        stop: bool = True,
        limit: int | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._model = model
        self._root = hookable(model, "a Catcher")
        ports = make_plan(self._root, [Tap((Selector.of(site, "input"),), Stats())]).ports
        if len(ports) != 1 or ports[0].site.kind not in ("input", "output"):
            found = ", ".join(port.site.name for port in ports[:4])
            raise PlanError(
                f"a Catcher waits at one module's input or output, e.g. 'blocks.0:input'; {site!r} picks {found}"
            )
        self.site = ports[0].site.name
        self._kind = ports[0].site.kind
        self._module = ports[0].site.module
        self._stop, self._limit = stop, limit
        self._keep = keep or (lambda tensor: tensor.detach().clone())
        self._stack = ExitStack()
        self.calls: list[CallArguments] = []  # of an input
        self.outputs: list[Any] = []  # of an output

    def __enter__(self) -> Self:
        module = self._module
        assert module is not None
        with ExitStack() as stack:
            stack.enter_context(running_eagerly(self._model))
            stack.callback(replace_forward(self._root, self._run))
            if module is not self._root:
                given = self._kind == "input"
                stop = Stop(self.site, module, inputs=given, outputs=not given)
                stack.enter_context(Visiting(self._root, self, [stop]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return len(self.calls) + len(self.outputs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.calls or self.outputs)

    def _run(self, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        own = self._module is self._root  # whose hooks would run outside of this
        try:
            if own and self._kind == "input":
                self._take_input(args, kwargs)
            output = forward(*args, **kwargs)
            if own and self._kind == "output":
                self._take_output(output)
            return output
        except _Caught as caught:
            if caught.catcher is not self:
                raise
            return None

    # -- the visitor's side ---------------------------------------------------------------------------------

    def before(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """A module is given these values. What a checkpoint repeats was caught the first time."""
        if not call.repeated:
            self._take_input(args, kwargs)

    def after(self, call: Call, output: object) -> None:
        """A module returned this."""
        if not call.repeated:
            self._take_output(output)

    def _take_input(self, args: Args, kwargs: Kwargs) -> None:
        if self._wants_more():
            self.calls.append(CallArguments(self._kept(args), self._kept(kwargs)))
            self._end()

    def _take_output(self, output: object) -> None:
        if self._wants_more():
            self.outputs.append(self._kept(output))
            self._end()

    def _wants_more(self) -> bool:
        return self._limit is None or len(self) < self._limit

    def _kept(self, tree: object) -> Any:
        return map_leaves(tree, lambda _, tensor: self._keep(tensor))

    def _end(self) -> None:
        if self._stop:
            raise _Caught(self)
