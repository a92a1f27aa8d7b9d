"""A folder that holds steps of an earlier attempt: what the next one does to them, told before it begins."""

from __future__ import annotations

from torchtap.session.outlets import Outlets

__all__ = ["tell_what_is_hidden"]


def tell_what_is_hidden(outlets: Outlets, recorded: range, first: int) -> None:
    """Say what becomes of the recorded steps where this attempt begins at step ``first``."""
    if isinstance(first, int) and first < recorded.stop:
        outlets.hint(
            "hidden",
            f"the folder holds steps up to {recorded[-1]} of an earlier attempt; this one begins at step "
            f"{first} and hides what it records again. To keep both, use another folder; to go on after "
            "them, leave start= out",
        )
    else:
        outlets.tell("continued", after=recorded[-1])
