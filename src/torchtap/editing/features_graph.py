"""The graph of a model with intermediate values among its outputs, for torch.jit.script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final, get_type_hints

from torch import fx, nn

from torchtap import Plan, Site
from torchtap.errors import FormError
from torchtap.hooks.leaves import children
from torchtap.plan.names import selector_parts
from torchtap.plan.plan import Port
from torchtap.spi import ModulePath, input_names

__all__ = ["graph_with_values"]


def graph_with_values(model: nn.Module, plan: Plan, stop: int | None) -> fx.GraphModule:
    """A module that gives ``(output, {site: tensor})`` and holds no hook, made by tracing the model."""
    tracer = _Tracer(plan, stop)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise FormError(
            f"features of this {type(model).__name__} cannot be scripted, since torch.fx cannot trace it "
            f"({type(error).__name__}: {error}); compile or export it instead"
        ) from error
    (end,) = [node for node in graph.nodes if node.op == "output"]
    output = None if stop is not None else end.args[0]
    end.args = ((output, {name: proxy.node for name, proxy in tracer.found.items()}),)
    _say_types(model, graph)
    module = fx.GraphModule(tracer.root, graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _say_types(model: nn.Module, graph: fx.Graph) -> None:
    """Real types in place of annotations that are only text, which the compiler of TorchScript cannot look up."""
    try:
        hints = get_type_hints(type(model).forward)
    except (NameError, TypeError):
        hints = {}
    for node in graph.nodes:
        node.type = hints.get(str(node.target).lstrip("*")) if node.op == "placeholder" else None


@final
class _Tracer(fx.Tracer):
    """Looks into every module that has a wanted one inside, and notes what passes at the wanted ones."""

    def __init__(self, plan: Plan, stop: int | None) -> None:
        super().__init__()
        self._plan, self._stop = plan, stop
        self._ports: dict[tuple[str, str], Port] = {
            (name.path, name.kind): port for port in plan.ports for name in port.names
        }
        self._calls: dict[int, int] = {}
        self.found: dict[str, fx.Proxy] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = f"{module_qualified_name}."
        if any(path.startswith(inside) for path, _ in self._ports):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        port = self._ports.get((path, "input"))
        if port is not None:
            names = input_names(m) or tuple(map(str, range(len(args))))
            self._note(port, {**dict(zip(names, args, strict=False)), **kwargs})
        output = super().call_module(m, forward, args, kwargs)
        port = self._ports.get((path, "output"))
        if port is not None:
            self._note(port, {"": output})
        return output

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        graph = super().trace(root, concrete_args)
        if ("", "output") in self._ports or ("", "input") in self._ports:
            raise ValueError("the model's own input and output are there anyway; name inner sites")
        return graph

    def _note(self, port: Port, values: dict[str, object]) -> None:
        call = self._calls.get(id(port), 0)
        self._calls[id(port)] = call + 1
        for index in port.taps:
            if index == self._stop:
                continue
            for name, value in values.items():
                for leaf, proxy in _leaves(value, name, "" if name else self._leaf_asked_for(index)):
                    site = Site(port.site.path, port.site.kind, leaf, call, module=port.site.module)
                    if self._plan.taps[index].wants((site,)):
                        self.found[site.name] = proxy

    def _leaf_asked_for(self, index: int) -> str:
        text = self._plan.taps[index].selectors[0].text
        return selector_parts(text)[2]


def _leaves(value: Any, name: str, asked: str = "") -> Iterator[tuple[str, fx.Proxy]]:
    """Return proxies by name. The output of a leaf module has no structure: ``asked`` has the leaves to look for."""
    if isinstance(value, fx.Proxy):
        inner: Any = value
        for part in ModulePath(asked).parts:
            inner = inner[int(part) if part.isdigit() else part]
        yield asked or name, inner
        return
    for key, child in children(value):
        yield from _leaves(child, (ModulePath(name) / str(key)))
