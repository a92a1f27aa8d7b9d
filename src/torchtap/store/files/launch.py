"""Which launch of a training this process belongs to, as its launcher tells it."""

from __future__ import annotations

import os
import socket

__all__ = ["launch_facts"]

_NUMBERS = {"restart": "TORCHELASTIC_RESTART_COUNT", "local_rank": "LOCAL_RANK", "group_rank": "GROUP_RANK"}


def launch_facts() -> dict[str, str | int]:
    """Process, host, and, under torchrun, the launch's name and how often it was restarted."""
    facts: dict[str, str | int] = {"pid": os.getpid(), "host": socket.gethostname()}
    if name := os.environ.get("TORCHELASTIC_RUN_ID"):
        facts["run_id"] = name
    for fact, variable in _NUMBERS.items():
        if (text := os.environ.get(variable, "")).isdigit():
            facts[fact] = int(text)
    return facts
