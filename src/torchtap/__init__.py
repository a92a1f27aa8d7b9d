"""torchtap: see every value inside a running PyTorch model.

The front door: names only. Nothing is imported until it is used, so that reading a run needs no torch and
``import torchtap`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtap.errors import TorchtapError as TorchtapError

__version__ = "0.1.0"

# Where each public name lives. A test holds that this, the imports above and the documentation agree.
_HOME = {
    "TorchtapError": "torchtap.errors",
}

__all__ = ["TorchtapError", "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
