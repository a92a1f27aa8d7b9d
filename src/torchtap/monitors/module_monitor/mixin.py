"""``MonitorMixin``: how a module's own code reaches the monitor while it runs.

A copy or a pickle of the module knows no monitor, and a module that no monitor was set on says that nothing is
monitored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import nn

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["MonitorMixin"]


@final
class _Link:
    """A module's monitor; empty in a copy of the module."""

    __slots__ = ("is_reference", "monitor")

    def __init__(self, monitor: object = None, is_reference: bool = False) -> None:
        self.monitor = monitor
        self.is_reference = is_reference

    def __deepcopy__(self, memo: object) -> _Link:
        return _Link()

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[object, ...]:
        return _Link, ()


_NO_LINK = _Link()


class MonitorMixin:
    """A module that subclasses this may log values of its own: ``if self.is_monitoring: ...``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        # Named before nn.Module among the bases, this is the initialiser that runs; named after it, it may be called
        # once more on a module that is complete.
        if not isinstance(self, nn.Module) or "_parameters" not in self.__dict__:
            super().__init__(*args, **kwargs)

    def set_module_monitor(
        self, monitor: ModuleMonitor | None = None, is_reference_module: bool = False
    ) -> None:
        """Called by the monitor for every module that has this method."""
        self.__dict__["_monitor_link"] = _Link(monitor, is_reference_module)

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor that this module belongs to, if any."""
        return self.module_monitor

    @property
    def module_monitor(self) -> ModuleMonitor | None:
        """The same, as an attribute."""
        return self.__dict__.get("_monitor_link", _NO_LINK).monitor  # type: ignore[no-any-return]

    @module_monitor.setter
    def module_monitor(self, monitor: ModuleMonitor | None) -> None:
        self.set_module_monitor(monitor, self.is_reference_module)

    @property
    def is_reference_module(self) -> bool:
        """Whether this module belongs to the monitor's reference."""
        return self.__dict__.get("_monitor_link", _NO_LINK).is_reference  # type: ignore[no-any-return]

    @is_reference_module.setter
    def is_reference_module(self, is_reference: bool) -> None:
        self.set_module_monitor(self.module_monitor, is_reference)

    @property
    def is_monitoring(self) -> bool:
        """Whether values that are logged now are kept."""
        monitor = self.module_monitor
        return monitor is not None and monitor.is_monitoring()
