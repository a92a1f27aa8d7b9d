"""When a tap is live: pure rules on the clock, combined with ``&``, ``|`` and ``~``.

No schedule keeps state, so asking twice gives the same answer; each says itself as JSON. A predicate is the
one exception to the latter: it is written down by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.schedule.base import Always as Always
    from torchtap.schedule.base import Moment as Moment
    from torchtap.schedule.base import Never as Never
    from torchtap.schedule.base import Schedule as Schedule
    from torchtap.schedule.base import schedule_of as schedule_of
    from torchtap.schedule.rules import Both as Both
    from torchtap.schedule.rules import Either as Either
    from torchtap.schedule.rules import Epochs as Epochs
    from torchtap.schedule.rules import Every as Every
    from torchtap.schedule.rules import First as First
    from torchtap.schedule.rules import Not as Not
    from torchtap.schedule.rules import Phase as Phase
    from torchtap.schedule.rules import Steps as Steps
    from torchtap.schedule.rules import When as When
    from torchtap.schedule.rules import schedule_from_spec as schedule_from_spec

_HOME = {
    "Always": "base",
    "Both": "rules",
    "Either": "rules",
    "Epochs": "rules",
    "Every": "rules",
    "First": "rules",
    "Moment": "base",
    "Never": "base",
    "Not": "rules",
    "Phase": "rules",
    "Schedule": "base",
    "Steps": "rules",
    "When": "rules",
    "schedule_from_spec": "rules",
    "schedule_of": "base",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)
