"""Every error of torchtap. A message says what was asked, what was found, and what to do.

    TorchtapError
    ├── SelectionError      (LookupError)        a selector or a name picks nothing
    ├── PlanError           (ValueError)         a tap, schedule or plan that cannot be carried out
    ├── FormError           (TypeError)          a model in a form that cannot be tapped this way
    ├── SessionError        (RuntimeError)       a session used in the wrong state
    │   └── MonitorError        (ValueError)         the same of a ready-made monitor
    ├── ReductionError      (ValueError)         a reduction or metric that failed on a value
    │   └── MetricError         (RuntimeError)       a metric of a ready-made monitor; names it and the module
    ├── VerificationError   (AssertionError)     taps changed the model
    ├── RecordingLostError  (RuntimeError)       strict recording: something could not be kept
    ├── RunError            (ValueError)         a run folder that cannot be used
    │   ├── RunNotFoundError    (FileNotFoundError)
    │   ├── RunFormatError                       not a run, or a newer format
    │   └── RunCorruptError                      damaged data was about to be returned
    ├── OutputError         (OSError)            a folder or file that cannot be written
    ├── ForwardStoppedError (ValueError)         a Catcher in a layer's place stopped the model, as asked
    ├── CompareError        (ValueError)         two things that cannot be compared
    ├── DiagnosisError      (ValueError)         a rule or a file of invariants that cannot be used
    ├── TrainingStoppedError (RuntimeError)      a doctor stopped the training, as asked
    └── MissingExtraError   (ImportError)        an optional package is needed

Each also inherits the builtin that a caller would catch. The message is positional and any context
keyword-only with a default, so that every error survives pickling between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchtap.sanitize import shown

__all__ = [
    "CompareError",
    "DiagnosisError",
    "FormError",
    "ForwardStoppedError",
    "MetricError",
    "MissingExtraError",
    "MonitorError",
    "OutputError",
    "PlanError",
    "RecordingLostError",
    "ReductionError",
    "RunCorruptError",
    "RunError",
    "RunFormatError",
    "RunNotFoundError",
    "SelectionError",
    "SessionError",
    "TorchtapError",
    "TrainingStoppedError",
    "VerificationError",
]


_LONGEST_MESSAGE = 20_000


class TorchtapError(Exception):
    """The root: ``except TorchtapError`` catches everything that torchtap raises on purpose.

    Its text is safe to print: messages name sites and files, which may be called anything.
    """

    def __str__(self) -> str:
        return shown(super().__str__(), _LONGEST_MESSAGE, lines=True)


class SelectionError(TorchtapError, LookupError):
    """A selector or a site name picks nothing."""

    def __init__(self, message: str, *, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class PlanError(TorchtapError, ValueError):
    """A tap, schedule or plan that cannot be carried out."""


class FormError(TorchtapError, TypeError):
    """A model in a form that cannot be tapped this way."""


class SessionError(TorchtapError, RuntimeError):
    """A session used in the wrong state: closed, nested in itself, a clock that goes backwards."""


class MonitorError(SessionError, ValueError):
    """A ready-made monitor used in the wrong state or with arguments that it cannot work with."""


class ReductionError(TorchtapError, ValueError):
    """A reduction or a user's metric failed on a value."""


class MetricError(ReductionError, RuntimeError):
    """A metric of a ready-made monitor failed on a value, or gave something that is no number."""


class VerificationError(TorchtapError, AssertionError):
    """A model with taps did not do exactly what it does without."""


class RecordingLostError(TorchtapError, RuntimeError):
    """Raised only by strict recordings: a value that was asked for could not be kept."""


class RunError(TorchtapError, ValueError):
    """A run folder that cannot be used."""


class RunNotFoundError(RunError, FileNotFoundError):
    """There is no run at that place."""


class RunFormatError(RunError):
    """The folder is not a run, or its format is newer than this torchtap reads."""


class RunCorruptError(RunError):
    """Stored data is damaged; nothing wrong is returned in its place."""


class OutputError(TorchtapError, OSError):
    """A folder or file that cannot be written."""


class ForwardStoppedError(TorchtapError, ValueError):
    """Not a mistake: a `Catcher` in a layer's place was asked to stop the model's forward there."""


class DiagnosisError(TorchtapError, ValueError):
    """A rule or a file of invariants that cannot be used."""


class TrainingStoppedError(TorchtapError, RuntimeError):
    """A doctor stopped the training, as it was asked to."""


class CompareError(TorchtapError, ValueError):
    """Two things that cannot be compared."""


class MissingExtraError(TorchtapError, ImportError):
    """An optional package is needed for this and is not installed."""

    def __init__(self, message: str, *, extra: str = "") -> None:
        super().__init__(message)
        self.extra = extra


@contextmanager
def needing(package: str, extra: str, *, who: str) -> Iterator[None]:
    """Imports in this block are of an optional package; where it is not installed, the error says who needs it."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(
            f"{who} needs {package}: pip install 'torchtap[{extra}]'", extra=extra
        ) from None
