"""Which launch of a training this process belongs to, as its launcher tells it.

The processes of one launch find each other at one address, and a restart counts up. ``key`` is made of what they all
must have in common; together with the number of processes it tells one launch from the next.
"""

from __future__ import annotations

import os
import socket

__all__ = ["launch_facts"]

_NUMBERS = {"restart": "TORCHELASTIC_RESTART_COUNT", "local_rank": "LOCAL_RANK", "group_rank": "GROUP_RANK"}
_COMMON = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def launch_facts() -> dict[str, str | int]:
    """Process, host, what tells the launch, and, under torchrun, its name and how often it was restarted."""
    facts: dict[str, str | int] = {"pid": os.getpid(), "host": socket.gethostname()}
    if name := os.environ.get("TORCHELASTIC_RUN_ID"):
        facts["run_id"] = name
    for fact, variable in _NUMBERS.items():
        if (text := os.environ.get(variable, "")).isdigit():
            facts[fact] = int(text)
    facts["key"] = "|".join(os.environ.get(variable, "") for variable in _COMMON)
    return facts
