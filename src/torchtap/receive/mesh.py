"""The place of this process among those of its training, as far as its model shows it.

The axes follow from the meshes of parameters, of ``fully_shard`` and of parallel plans, and from the process groups of
wrappers. Nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import nn

from torchtap._torch_distributed import (
    MeshAxis,
    flat_pieces,
    fsdp_axes,
    group_axis,
    mesh_axes,
    meshes_of,
    output_plan,
    wrapper_group,
)
from torchtap.placement import Share
from torchtap.rank_identity import identity

__all__ = ["ProcessMesh", "process_mesh"]


@final
@dataclass(slots=True)
class ProcessMesh:
    """The axes that this process has a place on."""

    rank: int
    world: int
    axes: dict[str, MeshAxis] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)  # axes along which ranks read different data
    flat: dict[tuple[int, str], tuple[tuple[int, ...], int, int]] = field(
        default_factory=dict
    )  # FSDP 1's pieces
    plans: dict[int, dict[str, tuple[Share, ...]]] = field(
        default_factory=dict
    )  # by id of a module, then axis

    @property
    def root(self) -> int:
        """Return the lowest rank on these axes."""
        count = 1
        for axis in self.axes.values():
            count *= len(axis.ranks)
        if count >= self.world or not self.axes:
            return 0
        return min(rank for axis in self.axes.values() for rank in axis.ranks)

    def add(self, axis: MeshAxis) -> str:
        """Add an axis, unless one that runs along it is known. Return the name that it has here."""
        for known in self.axes.values():
            if known.runs_along(axis) or known.ranks == axis.ranks:
                return known.name
        name = axis.name
        while name in self.axes:
            name += "'"
        self.axes[name] = axis._replace(name=name)
        return name

    def add_axes_of(self, module: nn.Module) -> None:
        """Add the axes of a module: its parameters' meshes, its wrapper's groups, its plan for outputs."""
        for mesh in meshes_of(module):
            for axis in mesh_axes(mesh):
                self.add(axis)
        self.data.update(self.add(axis) for axis in fsdp_axes(module))
        groups = wrapper_group(module)
        names = ("dp",) if len(groups) == 1 else ("replicate", "shard")
        for group, name in zip(groups, names, strict=False):
            axis = group_axis(group, name)
            if len(axis.ranks) > 1:
                self.data.add(self.add(axis))
        if (plan := output_plan(module)) is not None:
            mesh, layouts = plan
            named = [self.add(axis) for axis in mesh_axes(mesh)]
            if len(named) == 1:
                self.plans[id(module)] = {named[0]: layouts}


def process_mesh(model: nn.Module) -> ProcessMesh | None:
    """Return the mesh of a model and its wrappers; None if this process is alone."""
    here = identity()
    if here.world == 1:
        return None
    found = ProcessMesh(here.rank, here.world)
    if here.told_by != "process group":
        return found
    for module in model.modules():
        found.add_axes_of(module)
    found.flat = flat_pieces(model)
    return found
