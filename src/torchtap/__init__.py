"""torchtap: see every value inside a running PyTorch model.

The front door: names only. Nothing is imported until it is used, so that reading a run needs no torch and
``import torchtap`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtap import comparison as comparison
    from torchtap import datasets as datasets
    from torchtap import diagnosis as diagnosis
    from torchtap import errors as errors
    from torchtap import monitors as monitors
    from torchtap import schedule as schedule
    from torchtap import sinks as sinks
    from torchtap.comparison.bisection import Bisection as Bisection
    from torchtap.comparison.bisection import bisect as bisect
    from torchtap.comparison.forms import compare_forms as compare_forms
    from torchtap.comparison.front import compare as compare
    from torchtap.comparison.recordings import layer_changes as layer_changes
    from torchtap.comparison.result import Comparison as Comparison
    from torchtap.datasets.harvest import harvest as harvest
    from torchtap.datasets.reader import Activations as Activations
    from torchtap.datasets.reader import open_activations as open_activations
    from torchtap.datasets.reshuffle import reshuffle as reshuffle
    from torchtap.diagnosis.birth import Birth as Birth
    from torchtap.diagnosis.birth import find_nan as find_nan
    from torchtap.diagnosis.diagnose import diagnose as diagnose
    from torchtap.diagnosis.doctor import Doctor as Doctor
    from torchtap.diagnosis.doctor import doctor as doctor
    from torchtap.diagnosis.finding import Finding as Finding
    from torchtap.diagnosis.finding import Findings as Findings
    from torchtap.diagnosis.flight.recorder import FlightRecorder as FlightRecorder
    from torchtap.diagnosis.flight.recorder import flight_recorder as flight_recorder
    from torchtap.diagnosis.learned import Invariants as Invariants
    from torchtap.diagnosis.learned import learn as learn
    from torchtap.diagnosis.rule_type import Rule as Rule
    from torchtap.editing.catcher import Catcher as Catcher
    from torchtap.editing.edit import Edit as Edit
    from torchtap.editing.edit import edit as edit
    from torchtap.editing.features import Features as Features
    from torchtap.editing.features import features as features
    from torchtap.editing.handlers import hand_over as hand_over
    from torchtap.errors import CompareError as CompareError
    from torchtap.errors import DiagnosisError as DiagnosisError
    from torchtap.errors import FormError as FormError
    from torchtap.errors import MetricError as MetricError
    from torchtap.errors import MissingExtraError as MissingExtraError
    from torchtap.errors import MonitorError as MonitorError
    from torchtap.errors import OutputError as OutputError
    from torchtap.errors import PlanError as PlanError
    from torchtap.errors import RecordingLostError as RecordingLostError
    from torchtap.errors import ReductionError as ReductionError
    from torchtap.errors import RunCorruptError as RunCorruptError
    from torchtap.errors import RunError as RunError
    from torchtap.errors import RunFormatError as RunFormatError
    from torchtap.errors import RunNotFoundError as RunNotFoundError
    from torchtap.errors import SelectionError as SelectionError
    from torchtap.errors import SessionError as SessionError
    from torchtap.errors import TorchtapError as TorchtapError
    from torchtap.errors import TrainingStoppedError as TrainingStoppedError
    from torchtap.errors import VerificationError as VerificationError
    from torchtap.forms.instrument.extra import ExtraOutputs as ExtraOutputs
    from torchtap.forms.instrument.extra import extra_outputs as extra_outputs
    from torchtap.forms.instrument.instrument import instrument as instrument
    from torchtap.forms.instrument.load import load as load
    from torchtap.integrations.captum import attribute as attribute
    from torchtap.monitors.attention_heads import (
        monitor_scaled_dot_product_attention as monitor_scaled_dot_product_attention,
    )
    from torchtap.monitors.coordinate_check import RefinedCoordinateCheck as RefinedCoordinateCheck
    from torchtap.monitors.layers import LayerRecorder as LayerRecorder
    from torchtap.monitors.layers import get_layer_hidden_states as get_layer_hidden_states
    from torchtap.monitors.layers import open_layers as open_layers
    from torchtap.monitors.layers import record_layers as record_layers
    from torchtap.monitors.metric_storage import StorageManager as StorageManager
    from torchtap.monitors.module_monitor import HooksManager as HooksManager
    from torchtap.monitors.module_monitor import ModuleMonitor as ModuleMonitor
    from torchtap.monitors.module_monitor import MonitorMixin as MonitorMixin
    from torchtap.monitors.monitor import Monitor as Monitor
    from torchtap.monitors.trainer import MonitoredTrainer as MonitoredTrainer
    from torchtap.monitors.trainer import TrainingReport as TrainingReport
    from torchtap.plan.budget import Budget as Budget
    from torchtap.plan.plan import Plan as Plan
    from torchtap.plan.plan import make_plan as make_plan
    from torchtap.plan.sites import Selector as Selector
    from torchtap.plan.sites import Site as Site
    from torchtap.plan.tap import Tap as Tap
    from torchtap.plan.tap import tap as tap
    from torchtap.receive.by_name import emit as emit
    from torchtap.reduce import Entropy as Entropy
    from torchtap.reduce import Full as Full
    from torchtap.reduce import Gram as Gram
    from torchtap.reduce import Histogram as Histogram
    from torchtap.reduce import Metric as Metric
    from torchtap.reduce import Quantiles as Quantiles
    from torchtap.reduce import Reduction as Reduction
    from torchtap.reduce import Sample as Sample
    from torchtap.reduce import Stats as Stats
    from torchtap.reduce import TopK as TopK
    from torchtap.reduce import Units as Units
    from torchtap.registry import register as register
    from torchtap.schedule import Always as Always
    from torchtap.schedule import Epochs as Epochs
    from torchtap.schedule import Every as Every
    from torchtap.schedule import First as First
    from torchtap.schedule import Moment as Moment
    from torchtap.schedule import Never as Never
    from torchtap.schedule import Phase as Phase
    from torchtap.schedule import Schedule as Schedule
    from torchtap.schedule import Steps as Steps
    from torchtap.schedule import When as When
    from torchtap.session.capture import Seen as Seen
    from torchtap.session.capture import capture as capture
    from torchtap.session.capture import list_sites as list_sites
    from torchtap.session.capture import watch as watch
    from torchtap.session.coverage import Missing as Missing
    from torchtap.session.matching import match as match
    from torchtap.session.watch import Watch as Watch
    from torchtap.sinks import CallbackSink as CallbackSink
    from torchtap.sinks import JsonLinesSink as JsonLinesSink
    from torchtap.sinks import MemorySink as MemorySink
    from torchtap.sinks import TensorBoardSink as TensorBoardSink
    from torchtap.sinks import WandbSink as WandbSink
    from torchtap.sinks import make_sink as make_sink
    from torchtap.store.read.reader import Run as Run
    from torchtap.store.read.reader import open as open
    from torchtap.verification import Verification as Verification
    from torchtap.verification import verify as verify
    from torchtap.viewer.figures import plot as plot

__version__ = "0.1.0"

# Where each public name lives. A test holds that this, the imports above and the documentation agree.
_HOME = {
    "Activations": "torchtap.datasets.reader",
    "Always": "torchtap.schedule",
    "Birth": "torchtap.diagnosis.birth",
    "Bisection": "torchtap.comparison.bisection",
    "Budget": "torchtap.plan.budget",
    "CallbackSink": "torchtap.sinks",
    "Catcher": "torchtap.editing.catcher",
    "CompareError": "torchtap.errors",
    "Comparison": "torchtap.comparison.result",
    "DiagnosisError": "torchtap.errors",
    "Doctor": "torchtap.diagnosis.doctor",
    "Edit": "torchtap.editing.edit",
    "Entropy": "torchtap.reduce",
    "Epochs": "torchtap.schedule",
    "Every": "torchtap.schedule",
    "ExtraOutputs": "torchtap.forms.instrument.extra",
    "Features": "torchtap.editing.features",
    "Finding": "torchtap.diagnosis.finding",
    "Findings": "torchtap.diagnosis.finding",
    "First": "torchtap.schedule",
    "FlightRecorder": "torchtap.diagnosis.flight.recorder",
    "FormError": "torchtap.errors",
    "Full": "torchtap.reduce",
    "Gram": "torchtap.reduce",
    "Histogram": "torchtap.reduce",
    "HooksManager": "torchtap.monitors.module_monitor",
    "Invariants": "torchtap.diagnosis.learned",
    "JsonLinesSink": "torchtap.sinks",
    "LayerRecorder": "torchtap.monitors.layers",
    "MemorySink": "torchtap.sinks",
    "Metric": "torchtap.reduce",
    "MetricError": "torchtap.errors",
    "Missing": "torchtap.session.coverage",
    "MissingExtraError": "torchtap.errors",
    "ModuleMonitor": "torchtap.monitors.module_monitor",
    "Moment": "torchtap.schedule",
    "Monitor": "torchtap.monitors.monitor",
    "MonitorError": "torchtap.errors",
    "MonitorMixin": "torchtap.monitors.module_monitor",
    "MonitoredTrainer": "torchtap.monitors.trainer",
    "Never": "torchtap.schedule",
    "OutputError": "torchtap.errors",
    "Phase": "torchtap.schedule",
    "Plan": "torchtap.plan.plan",
    "PlanError": "torchtap.errors",
    "Quantiles": "torchtap.reduce",
    "RecordingLostError": "torchtap.errors",
    "Reduction": "torchtap.reduce",
    "ReductionError": "torchtap.errors",
    "RefinedCoordinateCheck": "torchtap.monitors.coordinate_check",
    "Rule": "torchtap.diagnosis.rule_type",
    "Run": "torchtap.store.read.reader",
    "RunCorruptError": "torchtap.errors",
    "RunError": "torchtap.errors",
    "RunFormatError": "torchtap.errors",
    "RunNotFoundError": "torchtap.errors",
    "Sample": "torchtap.reduce",
    "Schedule": "torchtap.schedule",
    "Seen": "torchtap.session.capture",
    "SelectionError": "torchtap.errors",
    "Selector": "torchtap.plan.sites",
    "SessionError": "torchtap.errors",
    "Site": "torchtap.plan.sites",
    "Stats": "torchtap.reduce",
    "Steps": "torchtap.schedule",
    "StorageManager": "torchtap.monitors.metric_storage",
    "Tap": "torchtap.plan.tap",
    "TensorBoardSink": "torchtap.sinks",
    "TopK": "torchtap.reduce",
    "Units": "torchtap.reduce",
    "TorchtapError": "torchtap.errors",
    "TrainingStoppedError": "torchtap.errors",
    "TrainingReport": "torchtap.monitors.trainer",
    "Verification": "torchtap.verification",
    "VerificationError": "torchtap.errors",
    "WandbSink": "torchtap.sinks",
    "Watch": "torchtap.session.watch",
    "When": "torchtap.schedule",
    "attribute": "torchtap.integrations.captum",
    "make_plan": "torchtap.plan.plan",
    "bisect": "torchtap.comparison.bisection",
    "capture": "torchtap.session.capture",
    "compare": "torchtap.comparison.front",
    "compare_forms": "torchtap.comparison.forms",
    "diagnose": "torchtap.diagnosis.diagnose",
    "doctor": "torchtap.diagnosis.doctor",
    "edit": "torchtap.editing.edit",
    "emit": "torchtap.receive.by_name",
    "extra_outputs": "torchtap.forms.instrument.extra",
    "features": "torchtap.editing.features",
    "find_nan": "torchtap.diagnosis.birth",
    "flight_recorder": "torchtap.diagnosis.flight.recorder",
    "hand_over": "torchtap.editing.handlers",
    "harvest": "torchtap.datasets.harvest",
    "get_layer_hidden_states": "torchtap.monitors.layers",
    "instrument": "torchtap.forms.instrument.instrument",
    "layer_changes": "torchtap.comparison.recordings",
    "learn": "torchtap.diagnosis.learned",
    "list_sites": "torchtap.session.capture",
    "load": "torchtap.forms.instrument.load",
    "match": "torchtap.session.matching",
    "make_sink": "torchtap.sinks",
    "monitor_scaled_dot_product_attention": "torchtap.monitors.attention_heads",
    "open": "torchtap.store.read.reader",
    "open_activations": "torchtap.datasets.reader",
    "open_layers": "torchtap.monitors.layers",
    "plot": "torchtap.viewer.figures",
    "register": "torchtap.registry",
    "record_layers": "torchtap.monitors.layers",
    "reshuffle": "torchtap.datasets.reshuffle",
    "tap": "torchtap.plan.tap",
    "verify": "torchtap.verification",
    "watch": "torchtap.session.capture",
}

# What most users type. What is needed more seldom is listed in modules of its own; it is found here too, and so are the
# types of results, for annotations.
_MODULES = ("comparison", "datasets", "diagnosis", "errors", "monitors", "schedule", "sinks")
__all__ = [
    "Budget",
    "Catcher",
    "Entropy",
    "Full",
    "Gram",
    "Histogram",
    "LayerRecorder",
    "Metric",
    "ModuleMonitor",
    "Monitor",
    "MonitorMixin",
    "MonitoredTrainer",
    "Plan",
    "Quantiles",
    "Reduction",
    "RefinedCoordinateCheck",
    "Sample",
    "Stats",
    "TopK",
    "Units",
    "__version__",
    "attribute",
    "capture",
    "compare",
    "comparison",
    "datasets",
    "diagnose",
    "diagnosis",
    "doctor",
    "edit",
    "emit",
    "errors",
    "extra_outputs",
    "features",
    "get_layer_hidden_states",
    "hand_over",
    "instrument",
    "list_sites",
    "load",
    "match",
    "monitors",
    "open",
    "plot",
    "record_layers",
    "register",
    "schedule",
    "sinks",
    "tap",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"torchtap.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
