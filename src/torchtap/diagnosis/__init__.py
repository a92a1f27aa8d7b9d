"""What is wrong in a training, by its cause: rules over a run's records, a doctor beside the loop, a flight recorder.

`torchtap.diagnose` and `torchtap.doctor` are the front of it; what is needed more seldom is named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.diagnosis.birth import Birth as Birth
    from torchtap.diagnosis.birth import find_nan as find_nan
    from torchtap.diagnosis.doctor import Doctor as Doctor
    from torchtap.diagnosis.finding import Finding as Finding
    from torchtap.diagnosis.finding import Findings as Findings
    from torchtap.diagnosis.flight.recorder import FlightRecorder as FlightRecorder
    from torchtap.diagnosis.flight.recorder import flight_recorder as flight_recorder
    from torchtap.diagnosis.learned.invariants import Invariants as Invariants
    from torchtap.diagnosis.learned.learning import learn as learn
    from torchtap.diagnosis.rules.base import Rule as Rule

_HOME = {
    "Birth": "birth",
    "Doctor": "doctor",
    "Finding": "finding",
    "Findings": "finding",
    "FlightRecorder": "flight.recorder",
    "Invariants": "learned.invariants",
    "Rule": "rules.base",
    "find_nan": "birth",
    "flight_recorder": "flight.recorder",
    "learn": "learned.learning",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
