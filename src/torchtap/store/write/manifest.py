"""The manifest of a run: its sites, its plan, the model and the machine, written before anything is recorded."""

from __future__ import annotations

import datetime
import inspect
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchtap._torch import TORCH_VERSION
from torchtap.plan.plan import Plan
from torchtap.plan.sites import unwrap
from torchtap.rank_identity import identity

__all__ = ["environment", "model_tree", "run_manifest", "source_of"]


def run_manifest(
    tree: nn.Module, plan: Plan, described: Mapping[str, object], labels: Mapping[str, object]
) -> dict[str, object]:
    """A run's manifest. ``described`` is the machine, as `environment` tells it; ``labels`` are the user's."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(),
        "sites": [
            {
                "name": port.site.name,
                "module": port.site.path,
                "kind": port.site.kind,
                "class": type(port.site.module).__name__,
                "source": source_of(port.site.module) if port.site.module is not None else None,
            }
            for port in plan.ports
        ],
        "aliases": plan.aliases,
        "other_names": plan.other_names,
        "plan": plan.spec(),
        "model": model_tree(tree),
        "environment": described,
        "labels": labels,
    }


def model_tree(model: nn.Module) -> dict[str, object]:
    """The model as nested modules: name, class, path, own parameters, where its forward is written."""
    seen: set[int] = set()

    def describe(module: nn.Module, name: str, path: str) -> dict[str, Any]:
        module = unwrap(module)
        node: dict[str, Any] = {
            "name": name,
            "path": path,
            "class": type(module).__name__,
            "parameters": sum(
                p.numel() for p in module._parameters.values() if p is not None and not is_lazy(p)
            ),
            "source": source_of(module),
            "children": [],
        }
        if id(module) in seen:
            node["shared"] = True
            return node
        seen.add(id(module))
        node["children"] = [
            describe(child, child_name, f"{path}.{child_name}" if path else child_name)
            for child_name, child in module._modules.items()
            if child is not None
        ]
        return node

    return describe(model, "", "")


def source_of(module: nn.Module) -> str | None:
    """``file.py:line`` of the module's forward, where Python or TorchScript still knows it."""
    forward = getattr(module, "forward", None)
    graph = getattr(forward, "graph", None)
    if graph is not None:  # TorchScript: every node knows the line it was compiled from
        for node in graph.nodes():
            line = re.match(r'\s*File "([^"]+)", line (\d+)', node.sourceRange())
            if line is not None:
                return f"{line[1]}:{line[2]}"
        return None
    if type(module).forward is nn.Module.forward:  # a stand-in, or a module that has none
        return None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def environment() -> dict[str, object]:
    """Versions and machine, as far as a reader of the run would want to know them."""
    here = identity()
    return {
        "python": sys.version.split()[0],
        "torch": TORCH_VERSION,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "rank": here.rank,
        "world_size": here.world,
        "rank_told_by": here.told_by,
    }
