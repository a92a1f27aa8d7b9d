"""Find out why a training run goes wrong: rules over its records, a doctor beside the loop, a flight recorder.

`torchtap.diagnose` and `torchtap.doctor` are the front door; less common names are here.
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
    from torchtap.diagnosis.learned import Invariants as Invariants
    from torchtap.diagnosis.learned import learn as learn
    from torchtap.diagnosis.rule_type import Need as Need
    from torchtap.diagnosis.rule_type import Rule as Rule
    from torchtap.diagnosis.rule_type import rule as rule

_HOME = {
    "Birth": "birth",
    "Doctor": "doctor",
    "Finding": "finding",
    "Findings": "finding",
    "FlightRecorder": "flight.recorder",
    "Invariants": "learned",
    "Need": "rule_type",
    "Rule": "rule_type",
    "find_nan": "birth",
    "flight_recorder": "flight.recorder",
    "learn": "learned",
    "rule": "rule_type",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
