"""A performance model of distributed deep-learning training.

    import perfmodel as pm
    pm.predict("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)

Names are imported on first use, so that `import perfmodel` stays immediate and starts no backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Cluster": "spec", "Device": "spec", "Job": "spec", "Layout": "spec", "Mlp": "spec", "ConvNet": "spec",
    "Framework": "spec", "NetworkLevel": "spec", "PeakRates": "spec", "Problem": "spec", "Transformer": "spec",
    "PerfModelError": "errors",
    "cluster": "catalog", "clusters": "catalog", "device": "catalog", "devices": "catalog",
    "framework": "catalog", "frameworks": "catalog", "model": "catalog", "models": "catalog", "problem": "catalog",
    "read_table": "io",
    "Session": "session",
    "fit": "learn",
    "Prediction": "prediction", "predict": "prediction",
    "Site": "prediction", "compare_schedules": "prediction",
    "whatif": "what_if",
    "EndToEnd": "calibration", "Run": "calibration", "calibrate_end_to_end": "calibration",
    "Launch": "readers.launch", "export_launch": "readers.launch", "read_launch": "readers.launch",
    "OpTable": "importers", "read_onnx": "importers", "read_sharded": "importers", "trace": "importers",
    "trace_program": "importers",
    "schedule_facts": "schedule",
    "SearchResult": "layout_search", "search": "layout_search", "pareto": "layout_search", "ask": "layout_search",
    "SearchOptions": "layout_search", "SearchSpace": "layout_search", "Tariff": "layout_search",
    "default_space": "layout_search", "restrict": "layout_search",
    "devices_for": "design", "memory_to_fit": "design", "overtake": "design", "rank_upgrades": "design",
    "read_runs": "validation", "validate_cases": "validation", "validate_kernels": "validation",
    "gantt": "viz", "write_gantt": "viz", "write_trace": "viz",
}  # fmt: skip
_RENAMED = {"fit": "fit_calibration"}

if TYPE_CHECKING:
    from perfmodel.calibration import EndToEnd, Run, calibrate_end_to_end
    from perfmodel.catalog import cluster, clusters, device, devices, framework, frameworks, model, models, problem
    from perfmodel.design import devices_for, memory_to_fit, overtake, rank_upgrades
    from perfmodel.errors import PerfModelError
    from perfmodel.importers import OpTable, read_onnx, read_sharded, trace, trace_program
    from perfmodel.io import read_table
    from perfmodel.layout_search import (
        SearchOptions,
        SearchResult,
        SearchSpace,
        Tariff,
        ask,
        default_space,
        pareto,
        restrict,
        search,
    )
    from perfmodel.learn import fit_calibration as fit
    from perfmodel.prediction import Prediction, Site, compare_schedules, predict
    from perfmodel.readers.launch import Launch, export_launch, read_launch
    from perfmodel.schedule import schedule_facts
    from perfmodel.session import Session
    from perfmodel.spec import (
        Cluster,
        ConvNet,
        Device,
        Framework,
        Job,
        Layout,
        Mlp,
        NetworkLevel,
        PeakRates,
        Problem,
        Transformer,
    )
    from perfmodel.validation import read_runs, validate_cases, validate_kernels
    from perfmodel.viz import gantt, write_gantt, write_trace
    from perfmodel.what_if import whatif


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    value = getattr(import_module(f"perfmodel.{_HOME[name]}"), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, and nothing that happens to be imported."""
    return sorted(["__doc__", "__version__", *_HOME])
