"""What a run says of itself before anything is recorded: its sites, its plan, the model and the machine."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from torch import nn

from torchtap.plan.plan import Plan
from torchtap.session.model_tree import model_tree, source_of

__all__ = ["run_manifest"]


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
