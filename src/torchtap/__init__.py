"""torchtap: see every value inside a running PyTorch model.

The front door: names only. Nothing is imported until it is used, so that reading a run needs no torch and
``import torchtap`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtap.errors import TorchtapError as TorchtapError
    from torchtap.reduce import Full as Full
    from torchtap.reduce import Reduction as Reduction
    from torchtap.reduce import Stats as Stats

__version__ = "0.1.0"

# Where each public name lives. A test holds that this, the imports above and the documentation agree.
_HOME = {
    "Full": "torchtap.reduce",
    "Reduction": "torchtap.reduce",
    "Stats": "torchtap.reduce",
    "TorchtapError": "torchtap.errors",
}

__all__ = ["Full", "Reduction", "Stats", "TorchtapError", "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
