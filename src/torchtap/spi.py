"""The interface between the core and everything built on it.

Packages outside the core (plan, hooks, reduce, receive, session, store) import these names, and the public names of
``torchtap`` itself; nothing else of the core. The same holds for extensions in other projects: a new model form, rank
layout, rule, probe, monitor or sink needs no other import. ``torchtap.testing`` has a contract class for each
extension point.

===================  ===========================================================================================
subject              names
===================  ===========================================================================================
names and structure  `Name`, `ModulePath`, `places`, `unwrap`, `input_names`, `leaves`, `input_leaves`, `map_leaves`
hooks and visitors   `Hooks`, `Visitor`, `Visiting`, `Stop`, `Call`
values               `Receiver`, `PortState`, `Attachment`, `reasons`, `ask_for_gradient`
training             `StepListener`, `parameters_of`, `LossCatcher`, `untouched`, `RandomState`, `environment`, `warn`
records              `Consumer`, `StepRecord`, `ScalarBlock`, `TensorItem`, `RunWriter`, `SharedFolder`
===================  ===========================================================================================

Every name is imported at its first use, so that ``import torchtap.spi`` costs nothing and needs no torch.
`SPI_VERSION` grows by one when a name is removed or changes its meaning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtap.hooks.hooks import Hooks as Hooks
    from torchtap.hooks.leaves import input_leaves as input_leaves
    from torchtap.hooks.leaves import leaves as leaves
    from torchtap.hooks.leaves import map_leaves as map_leaves
    from torchtap.hooks.visit import Call as Call
    from torchtap.hooks.visit import Stop as Stop
    from torchtap.hooks.visit import Visiting as Visiting
    from torchtap.hooks.visit import Visitor as Visitor
    from torchtap.plan.names import ModulePath as ModulePath
    from torchtap.plan.names import Name as Name
    from torchtap.plan.sites import input_names as input_names
    from torchtap.plan.sites import places as places
    from torchtap.plan.sites import unwrap as unwrap
    from torchtap.receive import reasons as reasons
    from torchtap.receive.backward import LossCatcher as LossCatcher
    from torchtap.receive.eager import Attachment as Attachment
    from torchtap.receive.gradients import ask_for_gradient as ask_for_gradient
    from torchtap.receive.receiver import PortState as PortState
    from torchtap.receive.receiver import Receiver as Receiver
    from torchtap.receive.training import StepListener as StepListener
    from torchtap.receive.training import parameters_of as parameters_of
    from torchtap.session.consumers import warn as warn
    from torchtap.store.record import Consumer as Consumer
    from torchtap.store.record import ScalarBlock as ScalarBlock
    from torchtap.store.record import StepRecord as StepRecord
    from torchtap.store.record import TensorItem as TensorItem
    from torchtap.store.shared_folder import SharedFolder as SharedFolder
    from torchtap.store.write.manifest import environment as environment
    from torchtap.store.write.writer import RunWriter as RunWriter
    from torchtap.untouched import RandomState as RandomState
    from torchtap.untouched import untouched as untouched

SPI_VERSION = 1

_HOME = {
    "Attachment": "torchtap.receive.eager",
    "Call": "torchtap.hooks.visit",
    "Consumer": "torchtap.store.record",
    "Hooks": "torchtap.hooks.hooks",
    "LossCatcher": "torchtap.receive.backward",
    "ModulePath": "torchtap.plan.names",
    "Name": "torchtap.plan.names",
    "PortState": "torchtap.receive.receiver",
    "RandomState": "torchtap.untouched",
    "Receiver": "torchtap.receive.receiver",
    "RunWriter": "torchtap.store.write.writer",
    "ScalarBlock": "torchtap.store.record",
    "SharedFolder": "torchtap.store.shared_folder",
    "StepListener": "torchtap.receive.training",
    "StepRecord": "torchtap.store.record",
    "Stop": "torchtap.hooks.visit",
    "TensorItem": "torchtap.store.record",
    "Visiting": "torchtap.hooks.visit",
    "Visitor": "torchtap.hooks.visit",
    "ask_for_gradient": "torchtap.receive.gradients",
    "environment": "torchtap.store.write.manifest",
    "input_leaves": "torchtap.hooks.leaves",
    "input_names": "torchtap.plan.sites",
    "leaves": "torchtap.hooks.leaves",
    "map_leaves": "torchtap.hooks.leaves",
    "parameters_of": "torchtap.receive.training",
    "places": "torchtap.plan.sites",
    "reasons": "torchtap.receive",
    "untouched": "torchtap.untouched",
    "unwrap": "torchtap.plan.sites",
    "warn": "torchtap.session.consumers",
}
_MODULES = ("reasons",)
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap.spi' has no attribute {name!r}")
    found = import_module(f"{home}.{name}") if name in _MODULES else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return ["SPI_VERSION", *__all__]
