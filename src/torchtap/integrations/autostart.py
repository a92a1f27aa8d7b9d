"""What torch calls at the end of ``import torch``, in every process: it records a training if ``TORCHTAP`` is set.

torch finds `start` by the entry point group ``torch.backends``. It guarantees:
- without ``TORCHTAP`` in the environment, or with 0, false, no or off, it returns at once and imports nothing;
- it never raises, because torch would turn an error into a failed ``import torch``.
"""

from __future__ import annotations

import os
import sys

__all__ = ["start"]


def start() -> None:
    """Record this process's training, if the environment asks for it."""
    words = os.environ.get("TORCHTAP", "")
    if words.lower() in ("", "0", "false", "no", "off"):
        return
    try:
        from torchtap.integrations.zero_code.recording import begin

        begin(words)
    except Exception as error:
        print(f"torchtap: this training is not recorded: {error}", file=sys.stderr)
