"""Build and load the test device ``lag`` (`lag.cpp`), and control it.

The build goes into a cache folder and takes about a minute, once for each torch and each source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["capable_of_streams", "counts", "held", "load", "missing", "recorded", "reset", "settle"]

_SOURCE = Path(__file__).with_name("lag.cpp")


def missing() -> str:
    """Return why the device cannot be built here, or nothing."""
    if os.name != "posix" or not hasattr(os, "memfd_create"):
        return "the test device needs Linux"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "c++")):
        return "the test device needs a C++ compiler"
    if shutil.which("ninja") is None:
        return "the test device needs ninja"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the test device needs Python's headers"
    return ""


@cache
def load() -> Any:
    """Build the extension if it is not there, register the device, and return the extension."""
    from torch.utils import cpp_extension

    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    name = f"lag_{digest}_{torch.__version__.split('+')[0].replace('.', '_')}"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "torchtap-tests", name)
    folder.mkdir(parents=True, exist_ok=True)
    extension = cpp_extension.load(
        name, [str(_SOURCE)], build_directory=str(folder), extra_cflags=["-O1", "-w"]
    )
    torch.utils.rename_privateuse1_backend("lag")
    extension.start()
    torch._register_device_module("lag", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension


def _module(extension: Any) -> types.ModuleType:
    """Return what torch expects to find as ``torch.lag``."""
    module: Any = types.ModuleType("torch.lag")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = extension.device
    module.set_device = lambda device: extension.set_device(_index(device, extension))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = lambda seed: extension.generator(extension.device()).manual_seed(seed)
    module.manual_seed_all = lambda seed: [extension.generator(index).manual_seed(seed) for index in range(2)]
    module.get_rng_state = lambda device="lag": extension.generator(_index(device, extension)).get_state()
    module.set_rng_state = lambda state, device="lag": extension.generator(
        _index(device, extension)
    ).set_state(state)
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.Stream, module.Event = torch.Stream, torch.Event
    return module


def _index(device: Any, extension: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return extension.device() if index is None else index


def reset(seed: int = 0, mean: float = 0.0) -> None:
    """Set all counts to zero, and the delays of kernels: about ``mean`` microseconds each, from this seed."""
    settle()
    load().reset(seed, mean)


def settle() -> None:
    """Wait until both devices have done everything."""
    for index in range(2):
        torch.accelerator.synchronize(torch.device("lag", index))


def counts() -> dict[str, int]:
    """Return what happened since `reset`."""
    found: dict[str, int] = load().counts()
    return found


@contextmanager
def held() -> Iterator[None]:
    """Run nothing on the device inside this block. A host wait lets it run, and is counted as ``blocked``."""
    load().hold(True)
    try:
        yield
    finally:
        load().hold(False)


@contextmanager
def recorded(into: list[str]) -> Iterator[None]:
    """List everything that is asked of the device inside this block."""
    load().record(True)
    try:
        yield
    finally:
        into += load().record(False)


@contextmanager
def capable_of_streams(capable: bool) -> Iterator[None]:
    """Take new streams and events away from the device inside this block."""
    load().set_capable(capable)
    try:
        yield
    finally:
        load().set_capable(True)


def read_early(tensor: Tensor) -> int:
    """Read the first byte of a tensor by its address, wherever it is."""
    found: int = load().read(tensor)
    return found
